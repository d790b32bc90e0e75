"""Castin et al., checks that were proposed for it: bounds on implementations, guided attacks, 128k.

N1 compares the bounds with models of several architectures, N2 the success of attacks that know
the constant with random ones of equal norm, S11 measures the constant at the context of GPT-4o.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipscope import Point
from lipscope.attack.perturbation import (
    gradient_perturbations,
    random_perturbations,
    singular_perturbations,
)
from lipscope.attack.tokens import duplicated_tokens, guided_swaps
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.local import local_lipschitz
from lipscope.models.embedded import default_text
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.papers.claims import Claim, Kind, Numbers, Quoted, Verdict, judged, power_law
from lipscope.papers.page import Line, Picture, columns
from lipscope.papers.setting import STAND_IN, Setting
from lipscope.probes.bounds import for_one_sequence
from lipscope.probes.token_target import TextReader, output_change, sentence_embedding
from lipscope.study.reading import special_frame
from lipscope.theorems.registry import bounds

SMALL = {
    "vocab_size": 2000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BERT": {"model_type": "bert", **SMALL},
    "RoBERTa": {"model_type": "roberta", **SMALL},
    "DistilBERT": {
        "model_type": "distilbert",
        "vocab_size": 2000,
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 96,
    },
    "GPT-2": {"model_type": "gpt2", "vocab_size": 2000, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "Llama": {"model_type": "llama", **SMALL, "num_key_value_heads": 2},
    "Mistral": {"model_type": "mistral", **SMALL, "num_key_value_heads": 2},
}
"""Small models of architectures that transformers has, with random weights."""

CASTIN = "Castin et al., ball"


def run_implementations(setting: Setting) -> Numbers:
    """sigma of every layer between its bounds, over lengths and architectures."""
    lengths = (8, 32) if setting.quick else (8, 32, 128, 256)
    makers: dict[str, Callable[[], Model]] = {
        "all-MiniLM-L6-v2": lambda: load(None),
        **{
            name: lambda config=config: setting.from_config(config, setting.seed, device="cpu")  # type: ignore[misc]
            for name, config in ARCHITECTURES.items()
        },
    }
    rows = []
    for name, make in setting.track(list(makers.items())):
        model = make()
        g = torch.Generator().manual_seed(setting.seed)
        for n in lengths:
            ids = torch.randint(10, 1900, (1, n), generator=g)
            for site in model.sites(ids, scopes=["attention"], layers=[0, model.layers - 1]):
                if not isinstance(site.f, SelfAttention):
                    continue
                f = for_one_sequence(site.f)
                sigma = local_lipschitz(f, site.X[0])
                upper = [row for row in bounds(f, Point(site.X[0])) if row.kind == "upper"]
                best = min(upper, key=lambda row: row.value)
                rows.append(
                    {
                        "model": name,
                        "layer": site.layer,
                        "n": n,
                        "sigma": float(sigma.value),
                        "paper": next((row.value for row in upper if row.name == CASTIN), None),
                        "best": best.value,
                        "name": best.name,
                        "broken": [row.name for row in upper if row.value < float(sigma.lower)],
                    }
                )
    return {"rows": rows}


def judge_implementations(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    broken = sum(bool(r["broken"]) for r in rows)
    paper = [r["paper"] / r["sigma"] for r in rows if r["paper"] is not None]
    best = [r["best"] / r["sigma"] for r in rows]
    reason = (
        f"{len({r['model'] for r in rows})} models, {len(rows)} layers and lengths: a bound is "
        f"below σ in {broken}; the paper's applies to {len(paper)} and is {min(paper):.3g} to "
        f"{max(paper):.3g} times σ, the smallest bound {min(best):.3g} to {max(best):.3g} times"
    )
    return judged(broken == 0, reason, (min(best), max(best)))


def plot_implementations(numbers: Numbers) -> Picture:
    rows = [
        [
            f"{r['model']}, layer {r['layer']}, n = {r['n']}",
            f"{r['sigma']:.3g}",
            f"{r['best']:.3g}",
            "–" if r["paper"] is None else f"{r['paper']:.3g}",
        ]
        for r in numbers["rows"]
    ]
    names = ", ".join(dict.fromkeys(r["name"] for r in numbers["rows"]))
    head = ["layer", "σ", f"smallest upper bound ({names})", f"{CASTIN}, where it applies"]
    return Picture("Bounds on implementations", columns=head, rows=rows)


WORD = "object"
"""Without labelled texts, the label is whether a paragraph contains this word."""

GUIDED = "singular direction of the scores"
STATES = "singular direction of the states"
GRADIENT = "projected gradient of the scores"
RANDOM = "random direction"
SWAP = "one word swapped"
COPY = "one word duplicated"
SHARES = (0.1, 0.3, 1.0)
"""Norms of perturbations, relative to that of one swapped word."""


def run_attacks(setting: Setting) -> Numbers:
    """A linear classifier on mean-pooled states, attacked at the norm of one swapped word."""
    model = load(None, dtype="float32")
    labelled = setting.labelled("ag_news") or [
        (int(WORD in text), text) for text in default_text().split("\n\n")
    ]
    count, training, length = (4, 80, 12) if setting.quick else (60, 800, 32)
    short = [(label, ids) for label, text in labelled if len(ids := model.encode(text)) >= length]
    samples = [(label, ids[:length]) for label, ids in short[: training + 4 * count]]
    before, after = special_frame(model)
    reader = TextReader(model, length, before, after)
    labels = torch.tensor([label for label, _ in samples])
    states = reader.hidden_of(torch.tensor([ids for _, ids in samples]))
    classify = _classifier(sentence_embedding(states)[:training], labels[:training])
    guesses = classify(sentence_embedding(states)).argmax(dim=1)
    right = (guesses == labels).double()
    held = [i for i in range(training, len(samples)) if bool(right[i])][:count]
    rows = []
    for i in setting.track(held):
        rows += _attack_text(model, reader, classify, samples[i][1], setting.seed + i)
    return {
        "rows": rows,
        "texts": len(held),
        "accuracy": right[training:].mean().item(),
        "classes": int(labels.max() - labels.min()) + 1,
    }


def _classifier(X: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Ridge regression on one-hot labels: a linear classifier of sentence embeddings."""
    targets = torch.nn.functional.one_hot(labels, int(labels.max()) + 1).to(X)
    ones = torch.cat([X, torch.ones_like(X[:, :1])], dim=1)
    weights = torch.linalg.solve(
        ones.T @ ones + 0.1 * torch.eye(ones.shape[1], dtype=X.dtype), ones.T @ targets
    )
    return lambda x: (x.to(weights) @ weights[:-1] + weights[-1]).to(x.dtype)


def _attack_text(
    model: Model,
    reader: TextReader,
    classify: Callable[[Tensor], Tensor],
    ids: Sequence[int],
    seed: int,
) -> list[dict[str, Any]]:
    """Every attack on one text: its norm and whether the label changed."""
    X = reader.rows[torch.tensor(list(ids))]
    target = output_change(model, list(ids), reader=reader, seed=seed)
    words = {
        SWAP: guided_swaps(target, ids, 1, width=16, seed=seed).ids,
        COPY: duplicated_tokens(target, ids, 1, width=16).ids,
    }
    swaps = {name: reader.rows[torch.tensor(list(new))] - X for name, new in words.items()}
    unit = swaps[SWAP].norm().item()
    radii = [share * unit for share in SHARES]

    def scores(E: Tensor) -> Tensor:
        mean = reader.hidden(E).mean(dim=1)
        return classify(mean / mean.norm(dim=1, keepdim=True).clamp_min(1e-12))[:, None]

    found = {
        GUIDED: singular_perturbations(scores, X, radii, seed=seed),
        STATES: singular_perturbations(reader.hidden, X, radii, seed=seed),
        GRADIENT: gradient_perturbations(scores, X, radii, steps=10, seed=seed),
        RANDOM: random_perturbations(X, radii, seed=seed),
    }
    tried = [
        (name, share, e) for name, E in found.items() for share, e in zip(SHARES, E, strict=True)
    ]
    tried += [(name, e.norm().item() / unit if unit else 0.0, e) for name, e in swaps.items()]
    with torch.no_grad():
        own = scores(X[None]).argmax()
        return [
            {"attack": name, "share": share, "success": bool(scores((X + e)[None]).argmax() != own)}
            for name, share, e in tried
        ]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a success rate."""
    z = 1.96
    p = successes / trials
    centre = p + z * z / (2 * trials)
    spread = z * math.sqrt(p * (1 - p) / trials + (z / trials / 2) ** 2)
    return (centre - spread) / (1 + z * z / trials), (centre + spread) / (1 + z * z / trials)


def _rates(numbers: Numbers) -> dict[tuple[str, float | None], tuple[int, int]]:
    """Successes and trials per attack and norm; swaps have norms of their own."""
    won: dict[tuple[str, float | None], list[bool]] = {}
    for row in numbers["rows"]:
        key = row["attack"], None if row["attack"] in (SWAP, COPY) else row["share"]
        won.setdefault(key, []).append(row["success"])
    return {key: (sum(found), len(found)) for key, found in won.items()}


def judge_attacks(numbers: Numbers, quoted: Quoted) -> Verdict:
    rates = _rates(numbers)
    full = {name: rates[name, 1.0] for name in (GUIDED, STATES, GRADIENT, RANDOM)}
    guided = wilson(*full[GUIDED])
    chance = wilson(*full[RANDOM])
    words = ", ".join(f"{name} {won} of {tried}" for name, (won, tried) in full.items())
    words += f", {SWAP} {rates[SWAP, None][0]}, {COPY} {rates[COPY, None][0]}"
    reason = (
        f"labels changed at the norm of one swapped word: {words} "
        f"({numbers['classes']} classes, accuracy {numbers['accuracy']:.2f})"
    )
    better = guided[0] > chance[1]
    if not better:
        reason += "; the intervals of guided and random attacks overlap"
    return judged(better, reason, guided)


def plot_attacks(numbers: Numbers) -> Picture:
    rows = []
    for (name, share), (won, tried) in _rates(numbers).items():
        low, high = wilson(won, tried)
        norm = "its own" if share is None else f"{share:g}"
        rows.append([name, norm, f"{won} of {tried}", f"{won / tried:.2f} [{low:.2f}, {high:.2f}]"])
    head = ["attack", "norm, in swapped words", "labels changed", "rate"]
    return Picture("Attacks at equal norm", columns=head, rows=rows)


LONG = "long-context"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def run_long(setting: Setting) -> Numbers:
    """sigma of one attention layer over lengths up to the context of GPT-4o."""
    folder = setting.folder(LONG)
    gpu = setting.device != "cpu"
    dtype = "float32" if gpu else "float64"
    if folder is None:
        setting.used[LONG] = STAND_IN + "a Llama with random weights"
        model = setting.from_config(LLAMA, setting.seed, dtype)
    else:
        model, _ = setting.model(LONG)
    lengths = [128, 256, 512] if setting.quick else [1024, 2048, 4096]
    if gpu:
        lengths = [4096, 131072] if setting.quick else [2**i for i in range(10, 18)]
    words, _ = setting.text("alice")
    ids = torch.tensor(model.encode(words))
    ids = ids if folder is not None else ids % LLAMA["vocab_size"]
    rows = []
    for n in setting.track(lengths):
        book = ids.repeat(-(-n // len(ids)))[:n][None]
        (site,) = model.sites(book, scopes=["attention"], layers=[model.layers // 2])
        found = local_lipschitz(site.f, site.X, 1e-2)[0]  # type: ignore[index]
        rows.append({"n": n, "sigma": found.value, "lower": found.lower, "upper": found.upper})
    return {"rows": rows, "dtype": dtype}


def judge_long(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    longest = rows[-1]
    fit = power_law([(r["n"], r["sigma"]) for r in rows])
    reason = (
        f"σ = {longest['sigma']:.4g} at n = {longest['n']:,}; from n = {rows[0]['n']:,} on it "
        f"grows like n^{fit.alpha:.2f}, and √n would have made it "
        f"{math.sqrt(longest['n'] / rows[0]['n']):.3g} times as large"
    )
    if longest["n"] < quoted["length"]:
        short = f"a GPU for n = {quoted['length']:,.0f} (--device cuda); {reason}"
        return Verdict(Kind.NEEDS, None, (longest["sigma"], longest["sigma"]), short)
    return judged(math.isfinite(longest["sigma"]), reason, (longest["lower"], longest["upper"]))


def plot_long(numbers: Numbers) -> Picture:
    (line,) = columns(numbers["rows"], "n", {"sigma": "σ of the layer"})
    root = [line.y[0] * math.sqrt(n / line.x[0]) for n in line.x]
    return Picture(
        "σ over long contexts", "n, tokens", "σ", [line, Line("√n", line.x, root, "dashes")]
    )


CLAIMS = [
    Claim("N1", run_implementations, judge_implementations, plot_implementations),
    Claim("N2", run_attacks, judge_attacks, plot_attacks, needs="AG_NEWS text"),
    Claim("S11", run_long, judge_long, plot_long, needs="gpu, a long-context model"),
]
