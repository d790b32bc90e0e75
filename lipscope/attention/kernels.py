"""How a query and a key become a score: dot product or squared distance, with rotary positions, softcap, sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope._types import UserError


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions: the tables cos, sin [n, k] turn queries and keys; coordinate j pairs with j + k/2."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def standard(
        n: int, size: int, base: float = 10000.0, dtype: torch.dtype = torch.float64
    ) -> Rope:
        """theta_j = base^(-2j/k), both halves of a head sharing the same angles."""
        frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(n, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
        return Rope(angle.cos().to(dtype), angle.sin().to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate [..., n, k]."""
        n, half = x.shape[-2], x.shape[-1] // 2
        if x.shape[-1] % 2:
            raise UserError(f"rope turns pairs of coordinates; the head size {x.shape[-1]} is odd")
        if self.cos.shape[0] < n or self.cos.shape[1] != x.shape[-1]:
            raise UserError(
                f"rope tables of shape {tuple(self.cos.shape)} do not cover {n} tokens of head size {x.shape[-1]}"
            )
        swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cos[:n].to(x) + swapped * self.sin[:n].to(x)

    def turn_back(self, x: Tensor) -> Tensor:
        """The adjoint of `turn`."""
        n, half = x.shape[-2], x.shape[-1] // 2
        y = x * self.sin[:n].to(x)
        return x * self.cos[:n].to(x) + torch.cat([y[..., half:], -y[..., :half]], dim=-1)


@dataclass(frozen=True, eq=False)
class Dot:
    """Score scale <q_i, k_j>, scale 1/sqrt(k) by default."""

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    rope: Rope | None = None


@dataclass(frozen=True, eq=False)
class L2:
    """Score -scale |q_i - k_j|^2, scale 1/sqrt(k) by default (Kim et al.): the dot product of augmented vectors.

    -s |q - k|^2 = <(2s q, -s |q|^2, 1), (k, 1, -s |k|^2)>.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


Kernel = Dot | L2

SEEN = 15
"""Tokens that the centre of the keys is taken from."""


def only_head(kernel: Kernel, head: int) -> Kernel:
    """The kernel of one head alone."""
    return kernel if kernel.sinks is None else replace(kernel, sinks=kernel.sinks[head : head + 1])


def default_scale(kernel: Kernel, size: int) -> float:
    return 1 / math.sqrt(size) if kernel.scale is None else kernel.scale


def common_centre(k: Tensor) -> Tensor:
    """A point amid the keys, [..., 1, 1, k], held fixed: medians of up to 15 tokens, averaged over heads.

    Squares about it lose the digits of distances that are short beside them. A mean would follow a single far token,
    and all others would lose theirs, those of a causal layer to a token they do not see.
    """
    few = k.detach()[..., :: -(-k.shape[-2] // SEEN), :]
    return (
        few.sort(dim=-2).values[..., few.shape[-2] // 2, :][..., None, :].mean(dim=-3, keepdim=True)
    )


def augment(kernel: L2, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The augmented q and k, about a common centre: distances do not see a shift, rounding does."""
    s = default_scale(kernel, q.shape[-1])
    centre = common_centre(k)
    q, k = q - centre, k - centre
    one = torch.ones_like(q[..., :1])
    q_long = torch.cat([2 * s * q, -s * q.square().sum(-1, keepdim=True), one], dim=-1)
    k_long = torch.cat(
        [k, torch.ones_like(k[..., :1]), -s * k.square().sum(-1, keepdim=True)], dim=-1
    )
    return q_long, k_long
