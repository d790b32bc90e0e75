"""Every number and statement that is quoted from the papers, with its source, in one table."""

from __future__ import annotations

from lipscope.reproduce.claims import Quoted

SCRIPT = "released scripts of Castin et al. (2024)"
SLIDES = "slides of Castin et al. (2024)"
FIRST = "first version of Castin et al. (2024)"
KIM = "Kim et al. (2021)"

CASTIN: dict[str, Quoted] = {}

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
