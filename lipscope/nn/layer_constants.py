"""The local Lipschitz constant of every attention layer of a model at the tokens that reach it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver
from lipscope.nn.attention_layer import AttentionLayer

TOL = 1e-3
"""Relative residual of the solve: plenty for a curve, and a handful of products. The seed is fixed, so that a training
that was interrupted has the same curve."""


def layer_constants(model: nn.Module, ids: Tensor) -> list[float]:
    """sigma of each AttentionLayer, in the order in which `model(ids)` calls them; ids is one sequence [n]."""
    seen: list[tuple[AttentionLayer, Tensor]] = []

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, AttentionLayer)
        seen.append((layer, arguments[0].detach()[0].clone()))

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, AttentionLayer)]
    try:
        with torch.no_grad():
            model(ids[None])
    finally:
        for handle in handles:
            handle.remove()
    return [_constant(layer, X) for layer, X in seen]


def _constant(layer: AttentionLayer, X: Tensor) -> float:
    if not X.isfinite().all():
        return float("nan")
    f: Callable[[Tensor], Tensor]
    try:
        f = layer.as_map(X.shape[0])
        X = X.to(f.Q.dtype)
    except UserError:  # no map of the papers: the module itself, by autograd
        f = layer
    return float(local_lipschitz(f, X, tol=TOL, solver=Solver(seed=0)).value)
