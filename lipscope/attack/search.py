"""What the searches share: the step rule of an ascent, and a result measured independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._display import Displayed
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate, as_batch
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, fresh_seed

LONGER = 1.5
SHORTER = 0.4
"""Factors for the stride after a trial that helped and after one that did not."""


@dataclass
class Search:
    """Several independent ascents side by side, one per member.

    value [B]:  the best value of each member so far
    state:      what belongs to it, each tensor [B, ...]
    stride [B]: the length of the next step; every member has its own, because one may creep along a
                ridge while another still leaps
    """

    value: Tensor
    state: tuple[Tensor, ...]
    stride: Tensor

    def judge(self, value: Tensor, *state: Tensor) -> Tensor:
        """Keep the trials that are higher, adapt the strides, and return which were kept, [B]."""
        higher = value > self.value
        self.value = torch.where(higher, value, self.value)
        self.state = tuple(
            torch.where(higher.to(old.device).reshape(-1, *[1] * (old.ndim - 1)), new, old)
            for new, old in zip(state, self.state, strict=True)
        )
        self.stride = torch.where(higher, LONGER * self.stride, SHORTER * self.stride)
        return higher


@dataclass(frozen=True, eq=False)
class Found(Displayed):
    """An input found by an attack.

    Attributes:
        name: How it was found.
        X: The input [n, d].
        sigma: The local Lipschitz constant there, measured from a start independent of the search.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> X = torch.ones(2, 3)
        >>> found = ls.attack.Found("ones", X, ls.local_lipschitz(lambda X: 2 * X, X))
        >>> round(found.value, 3)
        2.0
    """

    name: str
    X: Tensor
    sigma: Estimate

    @property
    def value(self) -> float:
        """sigma as a float."""
        return float(self.sigma.value)


def measured(f: Map, inputs: Sequence[tuple[str, Tensor]], seed: int) -> list[Found]:
    """Measure named inputs [n, d] together, the largest sigma first; f maps batches memberwise."""
    # Not the seed of the search, which may have adapted the input to its own start.
    X = torch.stack([x for _, x in inputs])
    estimates = as_batch(local_lipschitz(f, X, solver=Solver(seed=fresh_seed(seed, "measure"))))
    found = [Found(name, x, estimates[i]) for i, (name, x) in enumerate(inputs)]
    return sorted(found, key=lambda one: -one.value)
