"""Castin et al., statements about splitting: where copies of a token that move apart react more."""

from __future__ import annotations

import math

import torch
from torch import Generator

from lipscope.attack.tokens import guided_swaps, projected_swaps, random_swaps
from lipscope.attention.layer import SelfAttention
from lipscope.mean_field.duplication import splitting, splitting_map, splitting_table
from lipscope.mean_field.measures import DiscreteMeasure, push
from lipscope.mean_field.transport import wasserstein
from lipscope.models.loading import load
from lipscope.papers.castin_measures import line_attention, sigma_of
from lipscope.papers.claims import Numbers, Quoted, Verdict, claim, judged
from lipscope.papers.page import Picture
from lipscope.papers.setting import Setting
from lipscope.probes.token_target import layer_sigma


def run_where_split(setting: Setting) -> Numbers:
    """The share of pairs on the line that split, on two grids, and one pair by transport."""
    f = line_attention(-1.0)
    shares = []
    for points in (21, 41) if setting.quick else (41, 81):
        positions = torch.linspace(-4, 4, points, dtype=torch.float64)
        gain = splitting_map(f, positions).gain
        shares.append((gain > 1 + 1e-9).double().mean().item())
    return {"shares": shares, "largest": gain.max().item()} | _one_pair(f)


def _one_pair(f: SelfAttention) -> Numbers:
    """The tokens 0 and 4: moved as a whole, and with one of them in two halves, by transport."""
    found = splitting(f, torch.tensor([[0.0], [4.0]], dtype=torch.float64))
    mu = found.measure
    halves = found.halves(1e-5)
    return {
        "whole": found.together.value,
        "split": found.value,
        "by transport": wasserstein(push(f, halves), push(f, mu)) / wasserstein(halves, mu),
    }


def judge_where_split(numbers: Numbers, quoted: Quoted) -> Verdict:
    coarse, fine = numbers["shares"]
    reason = (
        f"{100 * coarse:.1f} % of the pairs of a grid split, {100 * fine:.1f} % of a grid twice as "
        f"fine: an open set, so infinitely many; the largest gain on it is {numbers['largest']:.3g}"
    )
    return judged(
        fine > 0 and 0.5 < coarse / fine < 2, reason, (min(coarse, fine), max(coarse, fine))
    )


def run_split_attack(setting: Setting) -> Numbers:
    return _one_pair(line_attention(-1.0))


def judge_split_attack(numbers: Numbers, quoted: Quoted) -> Verdict:
    gain = numbers["split"] / numbers["whole"]
    error = numbers["by transport"] / numbers["split"]
    reason = (
        f"tokens 0 and 4: {numbers['whole']:.4f} as a whole, {numbers['split']:.4f} in halves; "
        f"moved by optimal transport {numbers['by transport']:.4f}"
    )
    return judged(gain > 1 and abs(error - 1) < 1e-3, reason, (numbers["whole"], numbers["split"]))


def run_copies(setting: Setting) -> Numbers:
    """The constant with every atom in 1, 2, 3 and 8 copies."""
    g = Generator().manual_seed(setting.seed)
    rows = []
    for i in range(3 if setting.quick else 20):
        X = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
        if i:
            X = 4 * torch.randn(3, 1, generator=g, dtype=torch.float64)
        f = line_attention(-1.0)
        mu = DiscreteMeasure.uniform(X)
        rows.append(
            {str(k): sigma_of(f, mu if k == 1 else mu.split(k)) for k in (1, 2, 3, 8)}
            | {"theorem": splitting(f, mu).value}
        )
    return {"rows": rows}


def judge_copies(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    error = max(abs(r[k] / r["theorem"] - 1) for r in rows for k in ("2", "3", "8"))
    gain = max(r["2"] / r["1"] for r in rows)
    reason = (
        f"answered: 2, 3 and 8 copies of every token give the same constant to {error:.0e}, "
        f"up to {gain:.3g} times that of whole tokens"
    )
    return judged(error < 1e-6 and gain > 1, reason)


def run_features(setting: Setting) -> Numbers:
    """Three words replaced: by the gradient, by projecting an ascent in features, at random."""
    model = load(setting.folder("bert-base-uncased"), dtype="float32")
    words, _ = setting.text("ag_news")
    ids = model.encode(words)
    length, texts = (12, 1) if setting.quick else (32, 6)
    layer = model.layers // 2
    rows = []
    for i in setting.track(range(texts)):
        own = ids[i * length : (i + 1) * length]
        target = layer_sigma(model, layer, seed=setting.seed)
        guided = guided_swaps(target, own, 3, width=8, seed=setting.seed)
        found = {
            "guided": guided,
            "projected": projected_swaps(target, own, 3, steps=10),
            "random": random_swaps(target, own, 3, tries=guided.measured - 1, seed=setting.seed),
        }
        rows.append({name: one.factor for name, one in found.items()})
    return {"rows": rows, "layer": layer}


def judge_features(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    mean = {k: math.exp(sum(math.log(r[k]) for r in rows) / len(rows)) for k in rows[0]}
    lost = math.log(mean["projected"]) < 0.5 * math.log(mean["guided"])
    reason = (
        f"answered: {'not by projection' if lost else 'by projection too'}; three words raise σ of "
        f"layer {numbers['layer']} "
        f"{mean['guided']:.3f} times when the gradient picks words, {mean['projected']:.3f} times "
        f"when an ascent in features is projected to words, {mean['random']:.3f} times at random"
    )
    return judged(lost, reason, (mean["projected"], mean["guided"]))


def run_which_split(setting: Setting) -> Numbers:
    tries = 60 if setting.quick else 2000
    rows = splitting_table(n=3, tries=tries, seed=setting.seed)
    return {"rows": [{"map": r.name, "equal": r.equal, "free": r.free} for r in rows]}


def judge_which_split(numbers: Numbers, quoted: Quoted) -> Verdict:
    gains = {r["map"]: max(r["equal"], r["free"]) for r in numbers["rows"]}
    never = [name for name in gains if "L2" in name]
    dots = [name for name in gains if "L2" not in name]
    reason = (
        f"answered: {sum(gains[n] > 1 + 1e-6 for n in never)} of {len(never)} maps by squared "
        f"distances split (largest gain {max(gains[n] for n in never):.4f}), and "
        f"{sum(gains[n] > 1 + 1e-6 for n in dots)} of {len(dots)} dot-product maps, by up to "
        f"{max(gains[n] for n in dots):.3g}"
    )
    split = all(gains[n] > 1 + 1e-6 for n in dots)
    return judged(split and all(gains[n] <= 1 + 1e-6 for n in never), reason)


def plot_which_split(numbers: Numbers) -> Picture:
    rows = [[r["map"], f"{r['equal']:.4f}", f"{r['free']:.4f}"] for r in numbers["rows"]]
    return Picture(
        "Largest gains found, 3 tokens", columns=["map", "equal weights", "free weights"], rows=rows
    )


CLAIMS = [
    claim(
        "V2",
        "infinitely many pairs of tokens on the line split",
        run_where_split,
        judge_where_split,
    ),
    claim(
        "V4",
        "attacks that split a token beat those that move it",
        run_split_attack,
        judge_split_attack,
    ),
    claim(
        "V6",
        "open question: whether finitely many copies do as well as any splitting",
        run_copies,
        judge_copies,
    ),
    claim(
        "V7",
        "open question: whether attacks on features carry over to tokens",
        run_features,
        judge_features,
        needs="bert-base-uncased, AG_NEWS text",
    ),
    claim(
        "V8",
        "open question: which maps split",
        run_which_split,
        judge_which_split,
        plot_which_split,
    ),
]
