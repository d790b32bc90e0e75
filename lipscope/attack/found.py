"""What an attack hands back: an input, and its sigma as the core solver measures it afresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver


@dataclass(frozen=True, eq=False)
class Found:
    """An input X [n, d] with the local Lipschitz constant there, from a cold solve."""

    name: str
    X: Tensor
    sigma: Estimate

    @property
    def value(self) -> float:
        return float(self.sigma.value)


def measured(f: Map, inputs: Sequence[tuple[str, Tensor]], seed: int) -> list[Found]:
    """Named inputs [n, d] measured together, the largest sigma first; f maps a batch member by member."""
    X = torch.stack([x for _, x in inputs])
    estimates = local_lipschitz(f, X, solver=Solver(seed=seed))
    found = [Found(name, x, estimates[i]) for i, (name, x) in enumerate(inputs)]
    return sorted(found, key=lambda one: -one.value)
