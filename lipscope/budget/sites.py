"""The places in a model where a format makes an error, and the products <g, e> at each of them.

One backward pass per probe v gives g_s = J_s' v at every site s, whatever the formats; the product
with the error e_sf of format f at that site costs a dot product. Sites are the weights of linear
layers (Conv1D included), the inputs of linear layers, and the keys and values of every head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.budget.formats import Format, Quantiser
from lipscope.budget.metrics import Metric
from lipscope.budget.probing import batches, gradients
from lipscope.budget.subject import Sample, Subject, changing_cache, layer_of
from lipscope.models.plug import AttentionCall


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


def linears(module: nn.Module, embeddings: bool = False) -> dict[str, nn.Module]:
    """The linear layers by name; embeddings, and heads that share their weight, only if asked.

    A weight that several modules share is listed once.
    """
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, part in module.named_modules():
        if is_linear(part) or isinstance(part, nn.Embedding):
            key = id(part.weight)
            if embeddings or key not in tables:
                found.setdefault(key, (name, part))
    return dict(found.values())


def matrix(part: nn.Module) -> Tensor:
    """The weight of a linear layer as [out, in]; transformers' Conv1D stores its transpose."""
    return _weight(part).mT if type(part).__name__ == "Conv1D" else _weight(part)


def weight_error(part: nn.Module, quantise: Quantiser) -> Tensor:
    """What a format adds to the weight of a linear layer, as [out, in]."""
    W = matrix(part).detach()
    return quantise(W) - W


def collect_products(
    subject: Subject,
    formats: list[Format],
    metric: Metric,
    probes: int,
    seed: int,
    embeddings: bool = False,
) -> dict[str, Products]:
    """The products of every format at every site, from one forward pass per sequence."""
    layers = linears(subject.module, embeddings)
    errors = {
        name: torch.stack([weight_error(part, f.weight).flatten() for f in formats if f.weight])
        for name, part in layers.items()
        if any(f.weight for f in formats)
    }
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {f.name: [] for f in formats}
    sites: dict[str, list[ErrorSite]] = {}
    for sample in subject.sequences:
        with _graph(subject, layers, formats, sample) as graph:
            y = metric.read(graph.output)
            tensors = [*graph.weights.values(), *graph.inputs.values(), *graph.cache.values()]
            made = _errors_made(graph, formats, errors)
            parts = []
            for batch in batches(probes, tensors):
                v = torch.stack([metric.probe(y, generator) for _ in batch])
                with torch.enable_grad():
                    parts.append(_products(made, gradients([y], [v], tensors)))
        for f in formats:
            sites[f.name] = [site for name, site in parts[0][0] if name == f.name]
            chosen = [i for i, (name, _) in enumerate(parts[0][0]) if name == f.name]
            found[f.name].append(torch.cat([t[:, chosen] for _, t in parts]))
    return {name: Products(sites[name], torch.stack(parts, dim=1)) for name, parts in found.items()}


@dataclass(eq=False)
class _Graph:
    """One differentiable forward pass with the tensors at its sites."""

    weights: dict[str, Tensor]
    transposed: dict[str, bool]
    inputs: dict[str, Tensor]
    cache: dict[tuple[int, str], Tensor]
    output: Any = None


@contextmanager
def _graph(
    subject: Subject, layers: dict[str, nn.Module], formats: list[Format], sample: Sample
) -> Iterator[_Graph]:
    """Run the model with gradients at the sites that the formats need."""
    weighted = any(f.weight for f in formats)
    graph = _Graph(
        weights={name: _weight(part) for name, part in layers.items()} if weighted else {},
        transposed={name: type(part).__name__ == "Conv1D" for name, part in layers.items()},
        inputs={},
        cache={},
    )
    with ExitStack() as stack:
        for weight in graph.weights.values():
            weight.requires_grad_(True)
            stack.callback(weight.requires_grad_, False)
        if any(f.activation for f in formats):
            for name, part in layers.items():
                if is_linear(part):
                    handle = part.register_forward_pre_hook(_take_input(graph, name))
                    stack.callback(handle.remove)
        if any(f.cache for f in formats):
            check_routed(subject)
            stack.enter_context(changing_cache(_take_cache(graph)))
        with subject.ready(), torch.enable_grad():
            graph.output = subject.run(sample)
        yield graph


def check_routed(subject: Subject) -> None:
    """Raise UserError if keys and values cannot be reached."""
    if not subject.routed:
        raise UserError(
            f"{subject.name} does not call transformers' attention interface, so its keys and "
            "values cannot be reached; leave the kv formats out"
        )


def _take_input(graph: _Graph, name: str) -> Any:
    def hook(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A node of its own: the gradient must not include other uses of the same tensor.
        x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        graph.inputs[name] = x.view_as(x)
        return (graph.inputs[name], *args[1:])

    return hook


def _take_cache(graph: _Graph) -> Any:
    def change(call: AttentionCall) -> AttentionCall:
        layer = len(graph.cache) // 2
        parts = {}
        for kind, x in (("key", call.k), ("value", call.v)):
            x = x if x.requires_grad else x.detach().requires_grad_()
            parts[kind] = graph.cache[layer, kind] = x.view_as(x)
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


def _errors_made(graph: _Graph, formats: list[Format], weights: dict[str, Tensor]) -> list[_Errors]:
    """The errors at every site of the graph, in the order of its tensors."""
    made = []
    for name in graph.weights:
        site = ErrorSite(name, layer_of(name), "weight")
        split = _transposed if graph.transposed[name] else whole
        names = [f.name for f in formats if f.weight]
        made.append(_Errors(names, weights[name][:, None], split, [site]))
    for name, x in graph.inputs.items():
        named = {f.name: f.activation(x.detach()) - x.detach() for f in formats if f.activation}
        e = whole(torch.stack(list(named.values())))
        site = ErrorSite(name, layer_of(name), "activation")
        made.append(_Errors(list(named), e, whole, [site]))
    for (layer, kind), x in graph.cache.items():
        named = {f.name: f.cache(x.detach()) - x.detach() for f in formats if f.cache}
        e = by_head(torch.stack(list(named.values())))
        name = f"layer {layer} {kind}s"
        heads = [ErrorSite(name, layer, kind, head) for head in range(x.shape[1])]
        made.append(_Errors(list(named), e, by_head, heads))
    return made


def _products(
    made: list[_Errors], gradients: list[Tensor | None]
) -> tuple[list[tuple[str, ErrorSite]], Tensor]:
    """What each product belongs to, and the products [K, sites of all formats] on the CPU.

    Sites of modules that did not run (a pooler) have no gradient, and no product.
    """
    keys: list[tuple[str, ErrorSite]] = []
    found = []
    for errors, g in zip(made, gradients, strict=True):
        if g is not None:
            found.append(torch.einsum("fpe,kpe->kfp", errors.e, errors.split(g)).flatten(1))
            keys += [(name, site) for name in errors.formats for site in errors.sites]
    return keys, torch.cat(found, dim=1).double().cpu()


def whole(x: Tensor) -> Tensor:
    """Tensors [K, ...] as one part each, [K, 1, entries]."""
    return x.flatten(1)[:, None]


def by_head(x: Tensor) -> Tensor:
    """Keys or values [K, B, G, n, k] as one part per head, [K, G, entries]."""
    return x.transpose(1, 2).flatten(2)


def _transposed(x: Tensor) -> Tensor:
    return whole(x.mT)


def _weight(part: nn.Module) -> Tensor:
    assert isinstance(part.weight, Tensor)
    return part.weight


def is_linear(part: nn.Module) -> bool:
    """Whether a module multiplies its input by a weight: a linear layer or transformers' Conv1D."""
    return isinstance(part, nn.Linear) or (
        type(part).__name__ == "Conv1D" and getattr(getattr(part, "weight", None), "ndim", 0) == 2
    )
