"""How a query and a key become a score: dot product or distance, with rope, softcap and sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._display import Displayed
from lipscope._types import UserError


@dataclass(frozen=True, eq=False)
class Rope(Displayed):
    """Rotary positions, which rotate the queries and keys of a `Dot` kernel.

    Coordinate `j` is paired with coordinate `j + k/2`, as in Hugging Face models.

    Args:
        cos: Cosines of the angles, shape `[n, k]`, one row per position.
        sin: Sines of the angles, same shape.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> rope = ls.Rope.standard(n=4, size=2)
        >>> x = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
        >>> [round(t, 3) for t in rope.turn(x)[:, 0].tolist()]
        [1.0, 0.54, -0.416, -0.99]
    """

    cos: Tensor
    sin: Tensor

    @staticmethod
    def standard(
        n: int, size: int, base: float = 10000.0, dtype: torch.dtype = torch.float64
    ) -> Rope:
        """Return the usual tables, with frequencies `theta_j = base^(-2j/k)`.

        Args:
            n: Number of positions.
            size: Head size `k`, an even number.
            base: Base of the geometric sequence of frequencies.
            dtype: Dtype of the tables; angles are always computed in float64.
        """
        even = torch.arange(0, size, 2, dtype=torch.float64, device="cpu")
        place = torch.arange(n, dtype=torch.float64, device="cpu")
        angle = place[:, None] * (base ** (-even / size)).repeat(2)
        return Rope(angle.cos().to(dtype), angle.sin().to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate queries or keys `x` of shape `[..., n, k]`."""
        n = x.shape[-2]
        half = x.shape[-1] // 2
        if x.shape[-1] % 2:
            raise UserError(
                f"rope rotates pairs of coordinates and needs an even head size, got {x.shape[-1]}"
            )
        if self.cos.shape[0] < n or self.cos.shape[1] != x.shape[-1]:
            raise UserError(
                f"rope tables have shape {tuple(self.cos.shape)}, which does not cover {n} tokens "
                f"of head size {x.shape[-1]}; use Rope.standard({n}, {x.shape[-1]})"
            )
        swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cos[:n].to(x) + swapped * self.sin[:n].to(x)

    def turn_back(self, x: Tensor) -> Tensor:
        """Apply the adjoint of `turn`; it is the inverse only where the tables are rotations."""
        n = x.shape[-2]
        half = x.shape[-1] // 2
        y = x * self.sin[:n].to(x)
        return x * self.cos[:n].to(x) + torch.cat([y[..., half:], -y[..., :half]], dim=-1)


@dataclass(frozen=True, eq=False)
class Dot(Displayed):
    """Dot-product scores, `scale <q_i, k_j>`.

    Args:
        scale: Factor of the scores; `1/sqrt(k)` by default.
        softcap: If given, a score `t` becomes `softcap * tanh(t / softcap)`.
        sinks: If given, one logit per head, shape `[heads]`, added to the denominator of the
            softmax.
        rope: If given, rotary positions.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> f = ls.SelfAttention(I, I, I, kernel=ls.Dot(scale=0.0))
        >>> f(torch.tensor([[0.0, 2.0], [4.0, 0.0]], dtype=torch.float64)).tolist()
        [[2.0, 1.0], [2.0, 1.0]]
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    rope: Rope | None = None


@dataclass(frozen=True, eq=False)
class L2(Displayed):
    """Squared-distance scores, `-scale |q_i - k_j|^2` (Kim et al., 2021).

    With `K = Q` and values that factor through the queries, attention with these scores has a
    finite Lipschitz constant over all inputs.

    Args:
        scale: Factor of the squared distance; `1/sqrt(k)` by default.
        softcap: If given, a score `t` becomes `softcap * tanh(t / softcap)`.
        sinks: If given, one logit per head, shape `[heads]`, added to the denominator of the
            softmax.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> f = ls.SelfAttention(I, I, I, kernel=ls.L2())
        >>> rows = ls.bounds(f, ls.Everywhere(n=8))
        >>> any(row.kind == "upper" for row in rows)
        True
    """

    # Computed as the dot product of augmented vectors:
    #   -s |q - k|^2 = <(2s q, -s |q|^2, 1), (k, 1, -s |k|^2)>

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


Kernel = Dot | L2

SEEN = 15
"""Number of tokens that the centre of the keys is computed from."""


def default_scale(kernel: Kernel, size: int) -> float:
    return 1 / math.sqrt(size) if kernel.scale is None else kernel.scale


def common_centre(k: Tensor) -> Tensor:
    """A point amid the keys, [..., 1, 1, k], treated as a constant.

    It is the coordinatewise median of up to 15 tokens, averaged over heads.
    """
    # Squares about a centre that is far away cost the digits of short distances. A mean would
    # follow a single outlier, and every other token would lose digits to it, even to one that a
    # causal layer hides from them.
    few = k.detach()[..., :: -(-k.shape[-2] // SEEN), :]
    return (
        few.sort(dim=-2).values[..., few.shape[-2] // 2, :][..., None, :].mean(dim=-3, keepdim=True)
    )


def augment(kernel: L2, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The augmented q and k, whose dot product is the score."""
    s = default_scale(kernel, q.shape[-1])
    # A common shift leaves distances unchanged and makes the rounding of the squares smaller.
    centre = common_centre(k)
    q = q - centre
    k = k - centre
    one = torch.ones_like(q[..., :1])
    q_long = torch.cat([2 * s * q, -s * q.square().sum(-1, keepdim=True), one], dim=-1)
    k_long = torch.cat(
        [k, torch.ones_like(k[..., :1]), -s * k.square().sum(-1, keepdim=True)], dim=-1
    )
    return q_long, k_long
