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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.linalg.estimate import as_single
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models.plug import AttentionCall
from lipscope.probes.budget.formats import Format, read_formats
from lipscope.probes.budget.metrics import Measure, Metric, read_metric
from lipscope.probes.budget.probing import Connected, batches, gradients
from lipscope.probes.budget.running import distance, exact_outputs, outputs_in
from lipscope.probes.budget.sites import (
    ErrorSite,
    by_head,
    cache_sites,
    check_routed,
    weights_of,
    whole,
)
from lipscope.probes.budget.subject import (
    Sample,
    Source,
    Subject,
    Text,
    changing_cache,
    read_subject,
)
from lipscope.probes.budget.weights import Weight, is_linear
from lipscope.study.frames import data_frame

if TYPE_CHECKING:
    import pandas as pd

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

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame."""
        return data_frame(self.rows, Score._fields)


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


def worst_cases(
    subject: Subject,
    formats: list[Format],
    metric: Metric,
    progress: Callable[[float, float], None] | None = None,
) -> dict[str, float]:
    """By format, an upper bound of sum_s sigma_s |e_s| at the first sequence.

    That is at least the first-order error of all sites together, whatever their signs: sigma is the
    upper bound of :func:`spectral_norm`, with its confidence for every site. For formats of
    weights, keys and values; the others have more sites than can be measured.
    """
    if subject.dtype != torch.float64:
        raise UserError(
            f"the worst case needs upper bounds of sigma, which exist in float64; {subject.name} "
            "is loaded in a coarser dtype; load it in float64 (--dtype float64), or omit worst"
        )
    wanted = [f for f in formats if f.dtype is None and f.activation is None]
    if metric.divergence or not wanted:
        return {}
    first = replace(subject, sequences=subject.sequences[:1])
    size = sum(metric.size(y) for y in exact_outputs(first, metric))
    found = dict.fromkeys((f.name for f in wanted), 0.0)
    with _places(first, wanted, first.sequences[0]) as (places, output):
        y = metric.read(output)
        for number, place in enumerate(places):
            if progress is not None:
                progress(number, len(places))
            J = _following(place.node, y)
            if J is None:
                continue
            upper = as_single(spectral_norm(J, gap=0.1, solver=Solver(max_steps=200, seed=0))).upper
            for name, e in place.errors.items():
                parts = whole(e[None]) if place.sites[0].head is None else by_head(e[None])
                found[name] += upper * float(parts.norm(dim=-1).sum())
    return {name: total / size**0.5 for name, total in found.items()}


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


@dataclass(frozen=True, eq=False)
class _Place:
    """A tensor of the graph at which errors enter.

    node:   the tensor
    values: what is rounded there, to which its local error is relative
    errors: the error of each format, in the shape of the node
    weight: the parameter behind it, and its errors, for a linear layer
    """

    sites: list[ErrorSite]
    node: Tensor
    values: Tensor
    errors: dict[str, Tensor]
    weight: tuple[Tensor, dict[str, Tensor]] | None = None
    entropy: list[float] | None = None


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
        with _places(subject, formats, sample) as (places, output):
            y = metric.read(output)
            _add_local(found, places, len(subject.sequences))
            nodes = [p.node for p in places] + [p.weight[0] for p in places if p.weight]
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
    found: dict[str, dict[ErrorSite, dict[str, float]]], places: list[_Place], count: int
) -> None:
    """Scores that need no derivative, averaged over sequences."""
    for place in places:
        for name, e in place.errors.items():
            for i, site in enumerate(place.sites):
                sums = found[name].setdefault(site, {})
                whole, local = (x[:, i] if site.head is not None else x for x in (place.values, e))
                add = {"local output error": float(local.norm() / whole.norm()) / count}
                if place.weight is not None:
                    W = place.weight[0].detach()
                    errors = place.weight[1]
                    z = (W - W.mean()) / W.std()
                    add["weight error"] = float(errors[name].norm() / W.norm()) / count
                    add["kurtosis"] = float(z.pow(4).mean()) / count
                if place.entropy is not None:
                    add["low entropy"] = -place.entropy[i] / count
                for key, value in add.items():
                    sums[key] = sums.get(key, 0.0) + value


def _add_probes(
    found: dict[str, dict[ErrorSite, dict[str, float]]],
    places: list[_Place],
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
    places: list[_Place],
    y: Tensor,
) -> None:
    """Sigma of all that follows a site, at the first sequence, times the error there."""
    for place in places:
        J = _following(place.node, y)
        if J is None:
            continue
        # Two digits are enough for a score.
        estimate = as_single(spectral_norm(J, 5e-2, solver=Solver(max_steps=12, seed=0)))
        for name, e in place.errors.items():
            for i, site in enumerate(place.sites):
                local = e[:, i] if site.head is not None else e
                found[name][site]["sigma"] = (estimate.value * float(local.norm())) ** 2


def _following(node: Tensor, y: Tensor) -> LinearOperator | None:
    """The derivative of y with respect to a node of its graph, by two backward passes."""
    u = torch.zeros_like(y, requires_grad=True)
    (g,) = torch.autograd.grad(y, node, u, create_graph=True, allow_unused=True)
    if g is None:
        return None

    def mv(x: Tensor) -> Tensor:
        return torch.autograd.grad(g, u, x, retain_graph=True)[0].detach()

    def rmv(w: Tensor) -> Tensor:
        return torch.autograd.grad(y, node, w, retain_graph=True)[0].detach()

    return LinearOperator(
        mv,
        rmv,
        in_shape=tuple(node.shape),
        out_shape=tuple(y.shape),
        dtype=y.dtype,
        device=y.device,
    )


@contextmanager
def _places(
    subject: Subject, formats: list[Format], sample: Sample
) -> Iterator[tuple[list[_Place], Any]]:
    """Run the model with a node in its graph wherever an error enters."""
    places: list[_Place] = []
    weights = [f for f in formats if f.weight]
    caches = [f for f in formats if f.cache]
    handles = []
    graph = Connected()
    for w in weights_of(subject, weights, embeddings=False):
        w.parameter.requires_grad_(True)
        if w.part is not None and is_linear(w.part) and w.layer is not None:
            handles.append(w.part.register_forward_hook(_take(places, w, weights, graph)))
        else:
            # Not that of a linear layer, or of one that several layers share: its own error.
            dW = {f.name: w.error(f.weight) for f in weights if f.weight}
            places.append(
                _Place(
                    sites=[ErrorSite(w.name, w.layer, "weight")],
                    node=w.parameter,
                    values=w.parameter.detach(),
                    errors=dW,
                    weight=(w.parameter, dW),
                )
            )
    if caches:
        check_routed(subject)
    try:
        change = _cache(subject, places, caches, graph)
        with subject.ready(), torch.enable_grad(), graph, changing_cache(change):
            output = subject.run(sample)
        yield places, output
    finally:
        for handle in handles:
            handle.remove()
        subject.module.requires_grad_(False)


def _take(
    places: list[_Place], w: Weight, formats: list[Format], graph: Connected
) -> Callable[..., Tensor]:
    def hook(part: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        node = output.view_as(output)

        def product(weight: Tensor) -> Tensor:
            return args[0].detach() @ (weight.mT if isinstance(part, nn.Linear) else weight)

        with graph.paused():
            dW = {f.name: w.error(f.weight) for f in formats if f.weight}
            places.append(
                _Place(
                    sites=[ErrorSite(w.name, w.layer, "weight")],
                    node=node,
                    values=product(w.parameter.detach()),
                    errors={key: product(e) for key, e in dW.items()},
                    weight=(w.parameter, dW),
                )
            )
        return node

    return hook


def _cache(
    subject: Subject, places: list[_Place], formats: list[Format], graph: Connected
) -> Callable[[AttentionCall], AttentionCall]:
    calls = count()

    def change(call: AttentionCall) -> AttentionCall:
        number = next(calls)
        if not formats:
            return call
        with graph.paused():
            entropy = _entropy(call)
        parts = {}
        for kind, x in (("key", call.k), ("value", call.v)):
            x = x if x.requires_grad else x.detach().requires_grad_()
            node = parts[kind] = x.view_as(x)
            sites = cache_sites(subject, number, kind, x.shape[1])
            with graph.paused():
                errors = {f.name: f.cache(x.detach()) - x.detach() for f in formats if f.cache}
                places.append(_Place(sites, node, x.detach(), errors, entropy=entropy))
        return replace(call, k=parts["key"], v=parts["value"])

    return change


def _entropy(call: AttentionCall) -> list[float]:
    """Mean entropy of the attention of each key-value head, in nats."""
    n = call.k.shape[-2]
    eye = torch.eye(n, dtype=call.v.dtype, device=call.v.device)
    P = replace(call, v=eye.expand(*call.k.shape[:-1], n)).output()
    rows = torch.special.entr(P.clamp_min(0)).sum(dim=-1).mean(dim=(0, 2))
    return rows.reshape(call.k.shape[1], -1).mean(dim=-1).tolist()
