"""Which published score ranks the layers of a model right? Each one against the truth.

The truth of a site is the error of a run in which it alone is rounded. Scores of a weight, with
e = x dW' the local error at the output of its layer and g, g_W the gradients there:

    weight error        |dW| / |W|                      the objective of round-to-nearest
    local output error  |e| / |x W'|                    the objective of AWQ and GPTQ
    kurtosis            of the entries of W             a measure of outliers
    sigma               sigma of all that follows |e|   the worst case
    Frobenius           sqrt(E |g|^2 / entries) |e|     an error without direction
    trace               sqrt(E |g_W|^2 / entries) |dW|  the Gauss-Newton trace of HAWQ
    diagonal            sqrt(E sum g^2 e^2)             the diagonal of the Fisher matrix
    budget              sqrt(E <g, e>^2)                this package

Scores of a head of keys or values: its local error, the entropy of its attention (low entropy is
said to need more bits), and the same scores of derivatives.

    python -m benchmarks.budget_scores MODEL [FORMATS [TEXT_FILE]]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lipscope._display import text_table
from lipscope._types import UserError
from lipscope.linalg.estimate import as_single
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models.attention import AttentionCall
from lipscope.probes.budget.formats import Format, read_formats
from lipscope.probes.budget.metrics import Measure, Metric, read_metric
from lipscope.probes.budget.sites import (
    ErrorSite,
    by_head,
    distance,
    exact_outputs,
    outputs_in,
    whole,
)
from lipscope.probes.budget.subject import Source, Subject, Text, read_subject
from lipscope.probes.budget.tracing import batches, gradients
from lipscope.probes.budget.worst import Place, following, places_of

SCALED = ("sigma", "Frobenius", "trace", "diagonal", "budget")
"""Scores that are errors of the output, so that their size can be compared with the truth."""


class Score(NamedTuple):
    """How well a score ranks the sites of a format.

    rank:  Spearman's rank correlation with the truth
    scale: the median of score / truth, for scores that predict an error
    total: the score of all sites together over the observed error; sigma adds up, squares add up
    """

    format: str
    score: str
    rank: float
    scale: float | None
    total: float | None


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Scores of the layers or heads of a model, and the values they were computed from.

    rows:   one row per format and score
    values: by format and site, the truth and every score
    """

    rows: list[Score]
    values: dict[str, dict[ErrorSite, dict[str, float]]]

    def __str__(self) -> str:
        head = ("format", "score", "rank correlation", "predicted / observed", "all together")
        rows = [
            (row.format, row.score, *("-" if x is None else f"{x:.3g}" for x in row[2:]))
            for row in self.rows
        ]
        return text_table([head, *rows])


def compare_scores(
    model: Source = None,
    text: Text = None,
    *,
    formats: str | Iterable[str] = ("int8",),
    probes: int = 128,
    metric: Measure = "output",
    length: int = 64,
    samples: int = 4,
    sigma: bool = True,
    seed: int = 0,
) -> ScoreTable:
    """Compare scores of weights or of key-value heads with the truth, one site at a time.

    Args:
        model: As for :func:`error_budget`.
        text: As for :func:`error_budget`.
        formats: Weight formats (int8, int4:g, fp8) and cache formats (kv8, kv4).
        probes: Backward passes per sequence.
        metric: As for :func:`error_budget`.
        length: Maximum number of tokens per sequence.
        samples: Number of sequences taken from a text.
        sigma: Whether to measure sigma of all that follows each site, which takes longest.
        seed: Seed of the probes.
    """
    wanted = read_formats(formats)
    measure = read_metric(metric)
    for f in wanted:
        if f.dtype is not None or f.activation is not None:
            raise UserError(f"scores are of weights or of keys and values, not of {f.name}")
    subject = read_subject(model, text, head=measure.head, length=length, samples=samples)
    exact = exact_outputs(subject, measure)
    size = sum(measure.size(y) for y in exact)
    values: dict[str, dict[ErrorSite, dict[str, float]]] = {}
    gathered = _gather(subject, wanted, measure, probes, seed, sigma)
    rows: list[Score] = []
    for f in wanted:
        values[f.name] = {}
        whole = distance(measure, exact, outputs_in(subject, f, measure))
        for site, sums in gathered[f.name].items():
            scores = _scores(sums, measure, size)
            alone = outputs_in(subject, f, measure, only=site)
            values[f.name][site] = {"truth": distance(measure, exact, alone), **scores}
        rows += _ranked(f.name, values[f.name], whole, power=1 if measure.divergence else 2)
    return ScoreTable(rows, values)


def spearman(a: Iterable[float], b: Iterable[float]) -> float:
    """Rank correlation; NaN if one of the two is constant."""
    ranks = [torch.tensor(list(x)).argsort().argsort().double() for x in (a, b)]
    centred = [r - r.mean() for r in ranks]
    norm = centred[0].norm() * centred[1].norm()
    return float(centred[0] @ centred[1] / norm) if norm > 0 else math.nan


def _scores(sums: dict[str, float], metric: Metric, size: float) -> dict[str, float]:
    """Scores of one site from sums over sequences; those in SCALED are squares so far."""
    found = {name: value for name, value in sums.items() if name not in SCALED}
    for name in SCALED:
        if name in sums:
            found[name] = metric.value(sums[name], size)
    return found


def _ranked(
    format: str, values: dict[ErrorSite, dict[str, float]], whole: float, power: int
) -> list[Score]:
    rows = []
    for name in next(iter(values.values())):
        if name == "truth":
            continue
        pairs = [(v[name], v["truth"]) for v in values.values()]
        scale = total = None
        if name in SCALED:
            ratios = sorted(score / truth for score, truth in pairs if truth > 0)
            scale = ratios[len(ratios) // 2] if ratios else None
            p = 1 if name == "sigma" else power
            total = sum(score**p for score, _ in pairs) ** (1 / p) / whole
        rank = spearman((score for score, _ in pairs), (truth for _, truth in pairs))
        rows.append(Score(format, name, rank, scale, total))
    return rows


def _gather(
    subject: Subject,
    formats: list[Format],
    metric: Metric,
    probes: int,
    seed: int,
    sigma: bool,
) -> dict[str, dict[ErrorSite, dict[str, float]]]:
    """By format and site, the sums over sequences from which scores are made."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, dict[ErrorSite, dict[str, float]]] = {f.name: {} for f in formats}
    for b, sample in enumerate(subject.sequences):
        with places_of(subject, formats, sample) as (places, output):
            y = metric.read(output)
            _add_local(found, places, len(subject.sequences))
            nodes = [p.node for p in places] + [p.weight[0].parameter for p in places if p.weight]
            for batch in batches(probes, nodes):
                v = torch.stack([metric.probe(y, generator) for _ in batch])
                _add_probes(found, places, gradients([y], [v], nodes), probes)
            if sigma and b == 0 and not metric.divergence:
                _add_sigma(found, places, y)
    return {
        name: {site: sums for site, sums in sites.items() if sums.get("budget", 0.0) > 0}
        for name, sites in found.items()
    }


def _add_local(
    found: dict[str, dict[ErrorSite, dict[str, float]]], places: list[Place], count: int
) -> None:
    """Scores that need no derivative, averaged over sequences."""
    entropies = {id(p.call): _entropy(p.call) for p in places if p.call is not None}
    for place in places:
        for name, e in place.errors.items():
            for i, site in enumerate(place.sites):
                sums = found[name].setdefault(site, {})
                whole, local = (x[:, i] if site.head is not None else x for x in (place.values, e))
                add = {"local output error": float(local.norm() / whole.norm()) / count}
                if place.weight is not None:
                    W = place.weight[0].parameter.detach()
                    errors = place.weight[1]
                    z = (W - W.mean()) / W.std()
                    add["weight error"] = float(errors[name].norm() / W.norm()) / count
                    add["kurtosis"] = float(z.pow(4).mean()) / count
                if place.call is not None:
                    add["low entropy"] = -entropies[id(place.call)][i] / count
                for key, value in add.items():
                    sums[key] = sums.get(key, 0.0) + value


def _add_probes(
    found: dict[str, dict[ErrorSite, dict[str, float]]],
    places: list[Place],
    gradients: list[Tensor | None],
    probes: int,
) -> None:
    """Add the squares that a batch of probes gives to every score of derivatives."""
    weights = iter(gradients[len(places) :])
    for place, g in zip(places, gradients, strict=False):
        g_W = next(weights) if place.weight else None
        if g is None:
            continue
        split = whole if place.sites[0].head is None else by_head
        e, u = split(torch.stack(list(place.errors.values()))), split(g)  # [F | K, parts, entries]
        squares = u.square().sum(dim=0)
        sums = {
            "Frobenius": squares.mean(dim=-1) * e.square().sum(dim=-1),
            "diagonal": torch.einsum("pe,fpe->fp", squares, e.square()),
            "budget": torch.einsum("kpe,fpe->kfp", u, e).square().sum(dim=0),
        }
        if g_W is not None and place.weight is not None:
            dW = torch.stack(list(place.weight[1].values()))
            mean = g_W.square().sum(dim=0).mean()
            sums["trace"] = mean * dW.square().flatten(1).sum(dim=1)[:, None]
        table = torch.stack(list(sums.values())).tolist()  # [scores, formats, parts]
        for score, by_format in zip(sums, table, strict=True):
            for name, parts in zip(place.errors, by_format, strict=True):
                for site, value in zip(place.sites, parts, strict=True):
                    so_far = found[name][site]
                    so_far[score] = so_far.get(score, 0.0) + value / probes


def _add_sigma(
    found: dict[str, dict[ErrorSite, dict[str, float]]],
    places: list[Place],
    y: Tensor,
) -> None:
    """Sigma of all that follows a site, at the first sequence, times the error there."""
    for place in places:
        J = following(place.node, y)
        if J is None:
            continue
        # Two digits are enough for a score.
        estimate = as_single(spectral_norm(J, 5e-2, solver=Solver(max_steps=12, seed=0)))
        for name, e in place.errors.items():
            for i, site in enumerate(place.sites):
                local = e[:, i] if site.head is not None else e
                found[name][site]["sigma"] = (estimate.value * float(local.norm())) ** 2


@torch.no_grad()
def _entropy(call: AttentionCall) -> list[float]:
    """Mean entropy of the attention of each key-value head, in nats."""
    n = call.k.shape[-2]
    eye = torch.eye(n, dtype=call.v.dtype, device=call.v.device)
    P = replace(call, v=eye.expand(*call.k.shape[:-1], n)).output()
    rows = torch.special.entr(P.clamp_min(0)).sum(dim=-1).mean(dim=(0, 2))
    return rows.reshape(call.k.shape[1], -1).mean(dim=-1).tolist()


def main(model: str, formats: str = "int8", text: str | None = None) -> None:
    """Print the table of a model."""
    print(compare_scores(model, None if text is None else Path(text), formats=formats))


if __name__ == "__main__":
    main(*sys.argv[1:])
