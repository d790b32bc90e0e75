"""The places in a model where a format makes an error, and the errors predicted and made there.

One backward pass per probe v gives g_s = J_s' v at every site s, whatever the formats; the product
with the error e_sf of format f at that site costs a dot product. Sites are the weights of products
(see weights.py), the inputs of linear layers, and the keys and values of every head. A format can
also be run, which makes the errors instead of predicting them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.models.attention import AttentionCall
from lipscope.models.capture import Captured, RecordedCall, capture
from lipscope.probes.budget.formats import Format, Quantiser
from lipscope.probes.budget.metrics import Metric
from lipscope.probes.budget.subject import (
    Sample,
    Subject,
    changing_cache,
    last_hidden,
    layers_entered,
)
from lipscope.probes.budget.tracing import Connected, batches, gradients
from lipscope.probes.budget.weights import Weight, is_linear


@dataclass(frozen=True)
class ErrorSite:
    """Where an error enters: the name of a module, its layer, and what is rounded there.

    kind: "weight", "activation", "key", "value", or the operation of a low-precision run
    head: the key-value head, for keys and values
    """

    name: str
    layer: int | None
    kind: str
    head: int | None = None


@dataclass(frozen=True, eq=False)
class Products:
    """t[k, b, s] = <g_s, e_s> for probe k, sequence b and site s, for one format."""

    sites: list[ErrorSite]
    t: Tensor


def collect_products(
    subject: Subject,
    formats: list[Format],
    metric: Metric,
    probes: int,
    seed: int,
    embeddings: bool = False,
) -> dict[str, Products]:
    """The products of every format at every site, from one forward pass per sequence."""
    weights = weights_of(subject, formats, embeddings)
    errors = {
        w.name: torch.stack([w.error(f.weight).flatten() for f in formats if f.weight])
        for w in weights
    }
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {f.name: [] for f in formats}
    sites: dict[str, list[ErrorSite]] = {}
    for sample in subject.sequences:
        with _graph(subject, weights, formats, sample) as graph:
            y = metric.read(graph.output)
            tensors = [w.parameter for w in weights]
            tensors += [x for _, x in graph.inputs] + list(graph.cache.values())
            made = _errors_made(subject, weights, graph, formats, errors)
            parts = []
            for batch in batches(probes, tensors):
                v = torch.stack([metric.probe(y, generator) for _ in batch])
                with torch.enable_grad():
                    parts.append(_products(made, gradients([y], [v], tensors)))
        for f in formats:
            sites[f.name] = [site for name, site in parts[0][0] if name == f.name]
            if not sites[f.name]:
                raise UserError(
                    f"the output of {subject.name} depends on nothing that {f.name} rounds; leave "
                    "the format out, or pass embeddings=True to round embeddings as well"
                )
            chosen = [i for i, (name, _) in enumerate(parts[0][0]) if name == f.name]
            found[f.name].append(torch.cat([t[:, chosen] for _, t in parts]))
    return {name: Products(sites[name], torch.stack(parts, dim=1)) for name, parts in found.items()}


def weights_of(subject: Subject, formats: list[Format], embeddings: bool) -> list[Weight]:
    """The weights that some of the formats round, if any of them does."""
    if not any(f.weight for f in formats):
        return []
    found = subject.weights(embeddings)
    # Where a product is not that of a module, its input is out of reach.
    out_of_reach = [
        w.name for w in found if not is_linear(w.part) and not isinstance(w.part, nn.Embedding)
    ]
    for f in formats:
        if f.activation and out_of_reach:
            raise UserError(
                f"{f.name} also rounds what {out_of_reach[0]} is multiplied with, and only inputs "
                f"of linear layers can be reached ({len(out_of_reach)} weights of {subject.name} "
                "are of another kind); use a format of weights alone, such as int8"
            )
    return found


@dataclass(eq=False)
class _Graph:
    """One differentiable forward pass with the tensors at its sites.

    inputs: the inputs of linear layers, one per call
    cache:  keys and values, by attention call
    """

    inputs: list[tuple[ErrorSite, Tensor]]
    cache: dict[tuple[int, str], Tensor]
    output: Any = None


@contextmanager
def _graph(
    subject: Subject, weights: list[Weight], formats: list[Format], sample: Sample
) -> Iterator[_Graph]:
    """Run the model with gradients at the sites that the formats need."""
    graph = _Graph(inputs=[], cache={})
    layer: list[int | None] = [None]
    names = {w.part: w.name for w in weights if w.part is not None and is_linear(w.part)}

    def take_input(found: Captured) -> RecordedCall:
        # A node of its own: the gradient must not include other uses of the same tensor.
        x = found.value.hidden
        x = x if x.requires_grad else x.detach().requires_grad_()
        node = x.view_as(x)
        graph.inputs.append((ErrorSite(names[found.module], layer[0], "activation"), node))
        return found.value.at(node)

    for w in weights:
        w.parameter.requires_grad_(True)
    try:
        with ExitStack() as stack:
            if any(f.activation for f in formats):
                stack.enter_context(layers_entered(subject, partial(layer.__setitem__, 0)))
                stack.enter_context(capture(dict.fromkeys(names, "input"), take_input))
            if any(f.cache for f in formats):
                check_routed(subject)
                stack.enter_context(changing_cache(_take_cache(graph)))
            # Also for code that asks whether gradients are enabled, as attention does.
            with subject.ready(), torch.enable_grad(), Connected():
                graph.output = subject.run(sample)
        yield graph
    finally:
        for w in weights:
            w.parameter.requires_grad_(False)


def check_routed(subject: Subject) -> None:
    """Raise UserError if keys and values cannot be reached."""
    if not subject.routed:
        raise UserError(
            f"{subject.name} does not call transformers' attention interface, so its keys and "
            "values cannot be reached; leave the kv formats out"
        )


def _take_cache(graph: _Graph) -> Any:
    def change(call: AttentionCall) -> AttentionCall:
        number = len(graph.cache) // 2
        parts = {}
        for kind, x in (("key", call.k), ("value", call.v)):
            x = x if x.requires_grad else x.detach().requires_grad_()
            parts[kind] = graph.cache[number, kind] = x.view_as(x)
        return replace(call, k=parts["key"], v=parts["value"])

    return change


@dataclass(frozen=True, eq=False)
class _Errors:
    """The errors of several formats in one tensor of the graph.

    e:     [formats, parts, entries]; a part is a head, or the whole tensor
    split: how gradients [K, ...] are brought into the shape [K, parts, entries]
    sites: the site of every part
    """

    formats: list[str]
    e: Tensor
    split: Callable[[Tensor], Tensor]
    sites: list[ErrorSite]


def _errors_made(
    subject: Subject,
    weights: list[Weight],
    graph: _Graph,
    formats: list[Format],
    errors: dict[str, Tensor],
) -> list[_Errors]:
    """The errors at every site of the graph, in the order of its tensors."""
    made = []
    for w in weights:
        site = ErrorSite(w.name, w.layer, "weight")
        names = [f.name for f in formats if f.weight]
        made.append(_Errors(names, errors[w.name][:, None], whole, [site]))
    for site, x in graph.inputs:
        named = {f.name: f.activation(x.detach()) - x.detach() for f in formats if f.activation}
        e = whole(torch.stack(list(named.values())))
        made.append(_Errors(list(named), e, whole, [site]))
    for (number, kind), x in graph.cache.items():
        named = {f.name: f.cache(x.detach()) - x.detach() for f in formats if f.cache}
        e = by_head(torch.stack(list(named.values())))
        heads = cache_sites(subject, number, kind, x.shape[1])
        made.append(_Errors(list(named), e, by_head, heads))
    return made


def cache_sites(subject: Subject, number: int, kind: str, heads: int) -> list[ErrorSite]:
    """The sites of the keys or values of an attention call."""
    layer = subject.attending[number]
    name = f"layer {layer} {kind}s" if layer >= 0 else f"attention {number} {kind}s"
    if layer >= 0 and subject.attending.count(layer) > 1:
        name += f" of call {number}"
    return [ErrorSite(name, layer if layer >= 0 else None, kind, head) for head in range(heads)]


def _products(
    made: list[_Errors], gradients: list[Tensor | None]
) -> tuple[list[tuple[str, ErrorSite]], Tensor]:
    """What each product belongs to, and the products [K, sites of all formats] on the CPU.

    Sites of modules that did not run (a pooler) have no gradient, and no product. What several
    calls of one module in a layer add up to is one site.
    """
    found: dict[tuple[str, ErrorSite], Tensor] = {}
    for errors, g in zip(made, gradients, strict=True):
        if g is not None:
            t = torch.einsum("fpe,kpe->kfp", errors.e, errors.split(g)).flatten(1)
            keys = [(name, site) for name in errors.formats for site in errors.sites]
            for key, column in zip(keys, t.T, strict=True):
                found[key] = found[key] + column if key in found else column
    t = torch.stack(list(found.values()), dim=1) if found else torch.empty(0, dtype=torch.float64)
    return list(found), t.double().cpu()


def whole(x: Tensor) -> Tensor:
    """Tensors [K, ...] as one part each, [K, 1, entries]."""
    return x.flatten(1)[:, None]


def by_head(x: Tensor) -> Tensor:
    """Keys or values [K, B, G, n, k] as one part per head, [K, G, entries]."""
    return x.transpose(1, 2).flatten(2)


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
