"""Weights of bounded norm: spectral normalisation and sigma-reparam as torch parametrizations.

Both divide by an upper bound of the norm taken anew in every pass, where a running power iteration divides by a lower
one. Neither gives dot-product attention a Lipschitz constant; on a ball of tokens the theorems say what they do give.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from lipscope._types import UserError
from lipscope.nn.matrix_norms import of_norm


class SpectralNormalised(nn.Module):
    """W constant / ||W||: the norm is `constant`, the direction is learned."""

    def __init__(self, constant: float = 1.0) -> None:
        super().__init__()
        if isinstance(constant, bool) or not isinstance(constant, int | float) or not 0 < constant < math.inf:
            raise UserError(f"constant must be a positive number, got {constant!r}")
        self.constant = float(constant)

    def forward(self, W: Tensor) -> Tensor:
        return of_norm(self.constant, W)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}"


class SigmaReparam(nn.Module):
    """W gamma / ||W|| with a learned gamma, 1 at first (Zhai et al. 2023): the norm is |gamma|."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, W: Tensor) -> Tensor:
        return of_norm(self.gamma, W)


def spectrally_normalise(module: nn.Module, constant: float = 1.0) -> nn.Module:
    """Every nn.Linear inside gets a weight of spectral norm `constant`; the module is returned."""
    return _parametrize(module, lambda: SpectralNormalised(constant))


def sigma_reparametrise(module: nn.Module) -> nn.Module:
    """Every nn.Linear inside gets a weight of spectral norm |gamma|, gamma learned; the module is returned."""
    return _parametrize(module, SigmaReparam)


def _parametrize(module: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise UserError(f"{type(module).__name__} holds no nn.Linear whose weight could be normalised")
    if any(is_parametrized(part, "weight") for part in linear):
        raise UserError(f"weights of {type(module).__name__} are parametrized already; start from a plain module")
    for part in linear:
        new = make().to(part.weight.device)
        register_parametrization(part, "weight", new.to(part.weight.dtype))
    return module
