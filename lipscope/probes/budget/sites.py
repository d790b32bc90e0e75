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
    hidden_states,
    last_hidden,
    own_node,
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
        node = own_node(found.value.hidden)
        graph.inputs.append((ErrorSite(names[found.module], layer[0], "activation"), node))
        return found.value.at(node)

    def take_cache(number: int, kind: str, x: Tensor, call: AttentionCall) -> Tensor:
        node = graph.cache[number, kind] = own_node(x)
        return node

    for w in weights:
        w.parameter.requires_grad_(True)
    try:
        with ExitStack() as stack:
            if any(f.activation for f in formats):
                stack.enter_context(hidden_states(subject, partial(layer.__setitem__, 0)))
                stack.enter_context(capture(dict.fromkeys(names, "input"), take_input))
            if any(f.cache for f in formats):
                check_routed(subject)
                stack.enter_context(changing_cache(take_cache))
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
    ids = [sample for sample in subject.sequences if isinstance(sample, Tensor)]
    # Whether all sequences can run as one batch whose outputs come apart again.
    plain = metric.divergence or metric.read is last_hidden
    exact = subject.routed and subject.dtype == torch.float64
    alike = len({row.shape for row in ids}) == 1
    with torch.no_grad(), subject.ready():
        if plain and exact and alike and subject.tokens <= STACKED:
            return list(metric.read(subject.run(torch.cat(ids))).split(1))
        return [metric.read(subject.run(sample)) for sample in subject.sequences]


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
    with _errors(subject, format, only, embeddings=embeddings):
        return exact_outputs(subject, metric)


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
    runs = []
    for strength in (0.0, 1.0):
        with _errors(subject, format, None, strength, kept, embeddings):
            runs += exact_outputs(subject, metric)
    exact, made = runs
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
        kept: dict[int, Tensor] = {}
        runs = []
        for strength in (0.0, step, -step):
            with _errors(one, format, only, strength, kept):
                runs += exact_outputs(one, metric)
        found.append((runs[1] - runs[2]) / (2 * step))
    return found


@contextmanager
def _errors(
    subject: Subject,
    format: Format,
    only: ErrorSite | None,
    strength: float = 1.0,
    kept: dict[int, Tensor] | None = None,
    embeddings: bool = False,
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

    def change_cache(number: int, kind: str, x: Tensor, call: AttentionCall) -> Tensor:
        assert format.cache is not None
        y = change(format.cache, x)
        if only is None:
            return y
        sites = cache_sites(subject, number % len(subject.attending), kind, x.shape[1])
        keep = torch.tensor([site == only for site in sites], device=x.device)
        return torch.where(keep[:, None, None], y, x)

    inputs: dict[nn.Module, str] = {}
    with ExitStack() as stack:
        for w in weights_of(subject, [format], embeddings):
            if format.weight and (only is None or (only.name, only.kind) == (w.name, "weight")):
                stack.callback(setattr, w.parameter, "data", w.parameter.data)
                w.parameter.data = w.parameter.data + strength * w.error(format.weight)
            if (
                w.part is not None
                and is_linear(w.part)
                and (only is None or (only.name, only.kind) == (w.name, "activation"))
            ):
                inputs[w.part] = "input"
        if format.activation and inputs:
            rounded = partial(change, format.activation)
            stack.enter_context(
                capture(inputs, lambda found: found.value.at(rounded(found.value.hidden)))
            )
        if format.cache:
            check_routed(subject)
            stack.enter_context(changing_cache(change_cache))
        yield
