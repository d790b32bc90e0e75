"""The local Lipschitz constant of every attention layer of a model at the tokens that reach it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipscope.linalg.spectral import Solver
from lipscope.mean_field.local import local_lipschitz
from lipscope.monitor.modules import ModuleWatch

TOL = 1e-3
"""Relative residual of the solve: accurate enough for a curve, for a handful of products. The seed
is fixed, so that an interrupted training has the same curve."""


def layer_constants(model: nn.Module, ids: Tensor) -> list[float]:
    """sigma of each attention layer, first to last, at its input in `model(ids)`; ids is [n]."""
    watch = ModuleWatch(model)
    watch.arm()
    try:
        with torch.no_grad():
            model(ids[None])
        seen = [sight for name in watch.names if (sight := watch.sight(name)) is not None]
    finally:
        watch.release()
    return [
        float(local_lipschitz(f, X, tol=TOL, solver=Solver(seed=0)).value)
        if X.isfinite().all()
        else math.nan
        for f, X in seen
    ]
