"""Bound the error that a format of weights, keys or values can make to first order.

With sigma_s an upper bound of the spectral norm of all that follows site s, the error of the output
is at most sum_s sigma_s |e_s|, whatever the signs of the errors e_s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.linalg.estimate import as_single
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models.attention import AttentionCall
from lipscope.models.capture import Captured, capture
from lipscope.probes.budget.formats import Format
from lipscope.probes.budget.metrics import Metric
from lipscope.probes.budget.sites import (
    ErrorSite,
    by_head,
    cache_sites,
    check_routed,
    exact_outputs,
    weights_of,
    whole,
)
from lipscope.probes.budget.subject import Sample, Subject, changing_cache, own_node
from lipscope.probes.budget.tracing import Connected
from lipscope.probes.budget.weights import Weight, is_linear


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor of the graph at which errors enter.

    node:   the tensor
    values: what is rounded there, or the product with it
    errors: the error of each format, in the shape of the node
    weight: the weight behind it, with its own error by format
    call:   the attention call that reads it, for keys and values
    """

    sites: list[ErrorSite]
    node: Tensor
    values: Tensor
    errors: dict[str, Tensor]
    weight: tuple[Weight, dict[str, Tensor]] | None = None
    call: AttentionCall | None = None


def worst_cases(
    subject: Subject,
    formats: list[Format],
    metric: Metric,
    progress: Callable[[float, float], None] | None = None,
) -> dict[str, float]:
    """Bound sum_s sigma_s |e_s| of every format at the first sequence.

    sigma is the upper bound of :func:`spectral_norm`, with its confidence for every site. Formats
    of activations and whole runs have more sites than can be measured, and no bound.
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
    with places_of(first, wanted, first.sequences[0]) as (places, output):
        y = metric.read(output)
        for number, place in enumerate(places):
            if progress is not None:
                progress(number, len(places))
            J = following(place.node, y)
            if J is None:
                continue
            upper = as_single(spectral_norm(J, gap=0.1, solver=Solver(max_steps=200, seed=0))).upper
            for name, e in place.errors.items():
                parts = whole(e[None]) if place.sites[0].head is None else by_head(e[None])
                found[name] += upper * float(parts.norm(dim=-1).sum())
    return {name: total / size**0.5 for name, total in found.items()}


def following(node: Tensor, y: Tensor) -> LinearOperator | None:
    """Return the derivative of y by a node of its graph, by two backward passes; None if zero."""
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
def places_of(
    subject: Subject, formats: list[Format], sample: Sample
) -> Iterator[tuple[list[Place], Any]]:
    """Run the model with a node in its graph wherever an error enters."""
    places: list[Place] = []
    weights = [f for f in formats if f.weight]
    caches = [f for f in formats if f.cache]
    graph = Connected()
    linear: dict[nn.Module, Weight] = {}
    for w in weights_of(subject, weights, embeddings=False):
        w.parameter.requires_grad_(True)
        if w.part is not None and is_linear(w.part) and w.layer is not None:
            linear[w.part] = w
        else:
            # Not that of a linear layer, or of one that several layers share: its own error.
            dW = {f.name: w.error(f.weight) for f in weights if f.weight}
            places.append(
                Place(
                    sites=[ErrorSite(w.name, w.layer, "weight")],
                    node=w.parameter,
                    values=w.parameter.detach(),
                    errors=dW,
                    weight=(w, dW),
                )
            )
    read: dict[nn.Module, Tensor] = {}

    def take(found: Captured) -> Tensor | None:
        """Note a linear layer: its input first, then a node for its output."""
        part = found.module
        if found.side == "input":
            read[part] = found.value.hidden
            return None
        w = linear[part]
        node = found.value.view_as(found.value)
        with graph.paused():
            x = read[part].detach()
            dW = {f.name: w.error(f.weight) for f in weights if f.weight}
            products = {
                name: x @ (matrix.mT if isinstance(part, nn.Linear) else matrix)
                for name, matrix in {"": w.parameter.detach(), **dW}.items()
            }
            places.append(
                Place(
                    sites=[ErrorSite(w.name, w.layer, "weight")],
                    node=node,
                    values=products.pop(""),
                    errors=products,
                    weight=(w, dW),
                )
            )
        return node

    def take_cache(number: int, kind: str, x: Tensor, call: AttentionCall) -> Tensor:
        node = own_node(x)
        sites = cache_sites(subject, number, kind, x.shape[1])
        with graph.paused():
            errors = {f.name: f.cache(x.detach()) - x.detach() for f in caches if f.cache}
            places.append(Place(sites, node, x.detach(), errors, call=call))
        return node

    if caches:
        check_routed(subject)
    try:
        with (
            capture(dict.fromkeys(linear, "both"), take),
            subject.ready(),
            torch.enable_grad(),
            graph,
            changing_cache(take_cache) if caches else nullcontext(),
        ):
            output = subject.run(sample)
        yield places, output
    finally:
        subject.module.requires_grad_(False)
