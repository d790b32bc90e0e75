"""Formats really run: the outputs of a model whose errors are not predicted but made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from lipscope.models.capture import capture
from lipscope.models.plug import AttentionCall
from lipscope.probes.budget.formats import Format, Quantiser
from lipscope.probes.budget.metrics import Metric
from lipscope.probes.budget.sites import ErrorSite, cache_sites, check_routed, weights_of
from lipscope.probes.budget.subject import Subject, changing_cache, last_hidden
from lipscope.probes.budget.weights import Weight, is_linear

STACKED = 4096
"""Sequences run as one batch up to this number of tokens."""


def exact_outputs(subject: Subject, metric: Metric) -> list[Tensor]:
    """What the metric reads in the reference, per sequence."""
    with torch.no_grad(), subject.ready():
        if _stackable(subject, metric):
            return list(metric.read(subject.run(torch.cat(_ids(subject)))).split(1))
        return [metric.read(subject.run(sample)) for sample in subject.sequences]


def _stackable(subject: Subject, metric: Metric) -> bool:
    """Whether all sequences can run as one batch whose outputs come apart again."""
    shapes = {ids.shape for ids in _ids(subject)}
    plain = metric.divergence or metric.read is last_hidden
    exact = subject.routed and subject.dtype == torch.float64
    return plain and exact and len(shapes) == 1 and subject.tokens <= STACKED


def _ids(subject: Subject) -> list[Tensor]:
    """The token ids of all samples; none if the model reads something else."""
    return [sample for sample in subject.sequences if isinstance(sample, Tensor)]


def outputs_in(
    subject: Subject,
    format: Format,
    metric: Metric,
    only: ErrorSite | None = None,
    embeddings: bool = False,
) -> list[Tensor]:
    """What the metric reads when the model runs in a format, or with its error at one site only."""
    if format.dtype is not None:
        low = subject if subject.dtype == format.dtype else subject.in_dtype(format.dtype)
        return exact_outputs(low, metric)
    return _outputs(subject, format, metric, only, embeddings=embeddings)


def distance(metric: Metric, exact: list[Tensor], other: Iterable[Tensor]) -> float:
    """The metric between two lists of outputs."""
    squared = sum(metric.squared(y, z) for y, z in zip(exact, other, strict=True))
    return metric.value(squared, sum(metric.size(y) for y in exact))


def second_order(
    subject: Subject,
    format: Format,
    metric: Metric,
    products: Tensor,
    seed: int,
    embeddings: bool = False,
) -> tuple[float, float]:
    """The squared part of a sequence's error that its products miss, and the squared error itself.

    That part is of second order, or a decision that is taken otherwise (of experts, say), or went
    through functions without derivatives. Activations, keys and values have the errors of the exact
    run: rounded again, they would differ by more than the second order.

    Args:
        products: <v, J e> of every probe v that is drawn with `seed`.
    """
    kept: dict[int, Tensor] = {}
    (exact,), (made,) = (
        _outputs(subject, format, metric, None, strength, kept, embeddings)
        for strength in (0.0, 1.0)
    )
    generator = torch.Generator().manual_seed(seed)
    v = torch.stack([metric.probe(exact, generator) for _ in products])
    seen = (v * (made - exact)).reshape(len(v), -1).sum(dim=1).double().cpu()
    return float((seen - products).square().mean()), metric.squared(exact, made)


def first_order_errors(
    subject: Subject,
    format: Format,
    metric: Metric,
    only: ErrorSite | None = None,
    step: float = 1e-4,
) -> list[Tensor]:
    """J e per sequence: what a format adds to the output to first order, by central differences."""
    found = []
    for sample in subject.sequences:
        one = replace(subject, sequences=(sample,))
        kept = dict[int, Tensor]()
        _outputs(one, format, metric, only, 0.0, kept)
        (up,), (down,) = (_outputs(one, format, metric, only, s, kept) for s in (step, -step))
        found.append((up - down) / (2 * step))
    return found


def _outputs(
    subject: Subject,
    format: Format,
    metric: Metric,
    only: ErrorSite | None,
    strength: float = 1.0,
    kept: dict[int, Tensor] | None = None,
    embeddings: bool = False,
) -> list[Tensor]:
    with _errors(subject, format, only, strength, kept, embeddings):
        return exact_outputs(subject, metric)


@contextmanager
def _errors(
    subject: Subject,
    format: Format,
    only: ErrorSite | None,
    strength: float,
    kept: dict[int, Tensor] | None,
    embeddings: bool,
) -> Iterator[None]:
    """Make the errors of a format in the runs inside."""
    calls = count()

    def change(quantise: Quantiser, x: Tensor) -> Tensor:
        """x with the error of this run, or with the one kept from an earlier run."""
        if kept is None:
            return x + strength * (quantise(x) - x)
        call = next(calls)
        if call not in kept:
            kept[call] = quantise(x) - x
        return x + strength * kept[call]

    inputs: dict[nn.Module, str] = {}
    with ExitStack() as stack:
        for w in weights_of(subject, [format], embeddings):
            if format.weight and _chosen(only, w.name, "weight"):
                stack.enter_context(_rounded(w, format.weight, strength))
            part = w.part if is_linear(w.part) else None
            if format.activation and part is not None and _chosen(only, w.name, "activation"):
                inputs[part] = "input"
        if format.activation and inputs:
            rounded = partial(change, format.activation)
            stack.enter_context(
                capture(inputs, lambda found: found.value.at(rounded(found.value.hidden)))
            )
        if format.cache:
            check_routed(subject)
            stack.enter_context(_rounded_cache(subject, partial(change, format.cache), only))
        yield


@contextmanager
def _rounded(weight: Weight, quantise: Quantiser, strength: float) -> Iterator[None]:
    kept = weight.parameter.data
    weight.parameter.data = kept + strength * weight.error(quantise)
    try:
        yield
    finally:
        weight.parameter.data = kept


@contextmanager
def _rounded_cache(
    subject: Subject, change_one: Quantiser, only: ErrorSite | None
) -> Iterator[None]:
    calls = count()

    def change(call: AttentionCall) -> AttentionCall:
        number = next(calls) % len(subject.attending)
        parts = {}
        for kind, x in (("key", call.k), ("value", call.v)):
            y = change_one(x)
            if only is not None:
                sites = cache_sites(subject, number, kind, x.shape[1])
                keep = torch.tensor([site == only for site in sites], device=x.device)
                y = torch.where(keep[:, None, None], y, x)
            parts[kind] = y
        return replace(call, k=parts["key"], v=parts["value"])

    with changing_cache(change):
        yield


def _chosen(only: ErrorSite | None, name: str, kind: str) -> bool:
    return only is None or (only.name, only.kind) == (name, kind)
