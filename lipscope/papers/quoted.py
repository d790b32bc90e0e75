"""Every number and statement that is quoted from the papers, with its source, in one table."""

from __future__ import annotations

from lipscope.papers.claims import Quoted

SCRIPT = "released scripts of Castin et al. (2024)"
SLIDES = "slides of Castin et al. (2024)"
FIRST = "first version of Castin et al. (2024)"
KIM = "Kim et al. (2021)"

CASTIN: dict[str, Quoted] = {
    **{
        f"C{first + i}": Quoted(f"{SCRIPT}, {folder}, figure {i + 1} of 8")
        for first, folder in ((1, "bert_encoder"), (9, "bert_decoder"), (17, "gpt2_random"))
        for i in range(8)
    },
    "C1": Quoted(
        f"{SCRIPT}, bert_encoder, Alice, layer 0: the curve labelled c n^(1/4)",
        {"constant": 14.3, "exponent": 0.24},
    ),
    "C9": Quoted(
        f"{SCRIPT}, bert_decoder, Alice, layer 0, curve", {"constant": 6.44, "exponent": 0.25}
    ),
    "C10": Quoted(
        f"{SCRIPT}, bert_decoder, Alice, layer 6, curve", {"constant": 6.44, "exponent": 0.25}
    ),
    "C18": Quoted(
        f"{SCRIPT}, gpt2_random, Alice, layer 6: the curve labelled c n^(1/4)",
        {"constant": 0.445, "exponent": 0.25},
    ),
    "C22": Quoted(
        f"{SCRIPT}, gpt2_random, AG_NEWS, layer 6: the curve labelled c n^(1/4)",
        {"constant": 0.445, "exponent": 0.25},
    ),
    "C25": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 0, curve", {"constant": 35.3, "exponent": 0.26}),
    "C26": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 6, curve", {"constant": 25.0, "exponent": 0.51}),
    "C27": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 0, over radius"),
    "C28": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 6, over radius"),
    "C29": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 6, size of tokens over length"),
    "C30": Quoted(
        f"{SCRIPT}, adversarial_data, BERT, layer 0, head 0",
        {"constant": 4.39, "exponent": 0.5, "R": 15.5, "layer": 0, "head": 0},
    ),
    "C31": Quoted(
        f"{SCRIPT}, adversarial_data, BERT as a decoder, layer 6, head 7",
        {"constant": 5.73, "exponent": 0.5, "R": 21.5, "layer": 6, "head": 7},
    ),
    "C32": Quoted(
        f"{SCRIPT}, adversarial_data, random GPT-2, layer 6, head 0, seed 320",
        {"constant": 0.92, "exponent": 0.5, "R": 100, "layer": 6, "head": 0, "seed": 320},
    ),
    "C33": Quoted(
        f"{SCRIPT}, adversarial_data, GPT-2, layer 0, head 0",
        {"constant": 46.9, "exponent": 0.5, "R": 10, "layer": 0, "head": 0},
    ),
    "C34": Quoted(f"{SCRIPT}, adversarial_data, toolbox, compute_bound"),
    "S1": Quoted(f"{SLIDES}, Theorems 1 and 2"),
    "S2": Quoted(
        f"{SLIDES}, R²γ ≈ 10² to 10³ in practical Transformers", {"low": 1e2, "high": 1e3}
    ),
    "S3": Quoted(f"{SLIDES}, example of Kim et al.", {"exponent": 2}),
    "S4": Quoted(f"{SLIDES}, large-radius regime"),
    "S5": Quoted(f"{SLIDES}, mean-field regime"),
    "S6": Quoted(f"{SLIDES}, picture of two plans"),
    "S7": Quoted(f"{SLIDES}, masked attention on measures: the same upper bound"),
    "S8": Quoted(f"{SLIDES}, L layers of step 1/L", {"exponent": -1}),
    "S9": Quoted(f"{SLIDES}, clusters of renormalised tokens"),
    "S10": Quoted(f"{SLIDES}, clusters for Gaussian inputs"),
    "S11": Quoted(f"{SLIDES}, context of 128k tokens", {"length": 131072}),
    "V1": Quoted(f"{FIRST}, section 3.2"),
    "V2": Quoted(f"{FIRST}, Figure 2"),
    "V3": Quoted(f"{FIRST}, search by gradient ascent"),
    "V4": Quoted(f"{FIRST}, attacks that split tokens"),
    "V5": Quoted(f"{FIRST}, open question on the scaling with length"),
    "V6": Quoted(f"{FIRST}, open question on finite and general splitting"),
    "V7": Quoted(f"{FIRST}, open question on tokens from features"),
    "V8": Quoted(f"{FIRST}, open question on which maps split"),
    "N1": Quoted("proposed check of Castin et al. (2024): bounds against implementations"),
    "N2": Quoted("proposed check of Castin et al. (2024): attacks guided by the constant"),
    "N3": Quoted("proposed check of Castin et al. (2024): where √n stops being tight"),
}

ANSWERS = "the authors' answers to the reviews, OpenReview DHSNrGhAY7W"

KIM2021: dict[str, Quoted] = {
    "K1": Quoted(
        f"{KIM}, section 5.1, Figure 2; lengths and starts: {ANSWERS}",
        {"largest length": 1000, "starts": 50},
    ),
    "K2": Quoted(f"{KIM}, appendix K; {ANSWERS}"),
    "K3": Quoted(f"{KIM}, section 5.2, Figure 3"),
    "K4": Quoted(f"{KIM}, section 5.3, Figure 4"),
    "K5": Quoted(f"{KIM}, Table 2 in appendix I"),
    "K6": Quoted(f"{KIM}, Figure 10 in appendix N; {ANSWERS}"),
    "K7": Quoted(
        f"{KIM}, Figure 11 in appendix N; depths: {ANSWERS}",
        {"dot product trains to depth": 10, "L2 trains to depth": 18},
    ),
    "K8": Quoted(f"{KIM}, Table 3 in appendix N; {ANSWERS}"),
    "K9": Quoted(f"{KIM}, Theorem 3.1", {"exponent of R": 2}),
    "K10": Quoted(
        f"{KIM}, Theorem 3.2",
        {"factor of ln N, norm inf": 4, "extra power of N, norm 2": 0.5},
    ),
    "A1": Quoted(f"{KIM}, sections 4 and 6, residual flows announced in {ANSWERS}"),
}

QUOTED: dict[str, Quoted] = {**CASTIN, **KIM2021}
