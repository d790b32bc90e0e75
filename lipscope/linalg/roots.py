"""Derivatives of roots at zero: distances by torch.cdist, and which operation is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

ROOTS = {"sqrt", "rsqrt", "pow", "norm", "linalgvectornorm", "euclideandist", "cdist", "pdist"}
"""Operations whose slope is infinite at zero, by their names in a graph."""

SMOOTH = (
    "use squared distances in their place, ||q||^2 + ||k||^2 - 2 <q, k>, or add a small number "
    "under the root"
)


class _Distance(torch.autograd.Function):
    """torch.cdist for p = 2, with derivatives of every order; 0 at distance 0, as PyTorch has it.

    PyTorch's own is not differentiable twice for few points, and NaN at distance 0 for many.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, mode: str) -> Tensor:
        distance = torch.cdist(x, z, compute_mode=mode)
        ctx.save_for_backward(x, z, distance)
        return distance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        x, z, distance = ctx.saved_tensors
        apart = distance > 0
        w = torch.where(apart, g / torch.where(apart, distance, 1), 0)
        left = x * w.sum(dim=-1, keepdim=True) - w @ z
        right = z * w.sum(dim=-2).unsqueeze(-1) - w.mT @ x
        return left.sum_to_size(x.shape), right.sum_to_size(z.shape), None


class TwiceDifferentiable(TorchFunctionMode):
    """Replaces torch.cdist for p = 2 by a function that can be differentiated twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.cdist:
            return func(*args, **(kwargs or {}))
        return self._distance(*args, **(kwargs or {}))

    @staticmethod
    def _distance(
        x1: Tensor,
        x2: Tensor,
        p: float = 2.0,
        compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
    ) -> Tensor:
        if p != 2:
            return torch.cdist(x1, x2, p, compute_mode)
        return _Distance.apply(x1, x2, compute_mode)


def uses_distances(y: Tensor) -> bool:
    """Whether torch.cdist is part of the graph of y."""
    return any(node.name().startswith(("Cdist", "EuclideanDist")) for node in _nodes(y))


def with_distances(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same map, with a torch.cdist that can be differentiated twice."""

    def same(X: Tensor) -> Tensor:
        with TwiceDifferentiable():
            return f(X)

    return same


def not_finite_in(f: Callable[[Tensor], Tensor], X: Tensor) -> str:
    """Name the operation whose derivative is the first that is not finite, and a remedy.

    Empty if there is none in a backward pass.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = X.detach().clone().requires_grad_(True)
        y = f(x.clone())
        if not y.isfinite().all():
            return "f(X) itself is not finite"
        found: list[str] = []

        def watch(node: Node) -> Any:
            def look(gradients: Any, given: Any) -> None:
                if not found and _finite(given) and not _finite(gradients):
                    found.append(node.name())

            return node.register_hook(look)

        handles = [watch(node) for node in _nodes(y)]
        try:
            torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
    if not found:
        return ""
    name = found[0].split("Backward")[0].lower()
    remedy = f"; its slope is infinite at 0: {SMOOTH}" if name in ROOTS else ""
    return f"the derivative of {name} is not finite at this input{remedy}"


def _finite(tensors: Any) -> bool:
    return all(x is None or bool(x.isfinite().all()) for x in tensors)


def _nodes(y: Tensor) -> Iterator[Node]:
    """The nodes of the graph of y."""
    seen = set[Node]()
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]
