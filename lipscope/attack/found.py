"""What an attack hands back: an input, and its sigma from a start that the search did not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, fresh_seed


@dataclass(frozen=True, eq=False)
class Found:
    """An input X [n, d] with the local Lipschitz constant there, from a fresh start."""

    name: str
    X: Tensor
    sigma: Estimate

    @property
    def value(self) -> float:
        return float(self.sigma.value)


def measured(f: Map, inputs: Sequence[tuple[str, Tensor]], seed: int) -> list[Found]:
    """Named inputs [n, d], found with `seed`, measured together from a fresh start.

    The largest sigma comes first; f maps a batch member by member.
    """
    X = torch.stack([x for _, x in inputs])
    estimates = local_lipschitz(f, X, solver=Solver(seed=fresh_seed(seed, "measure")))
    found = [Found(name, x, estimates[i]) for i, (name, x) in enumerate(inputs)]
    return sorted(found, key=lambda one: -one.value)
