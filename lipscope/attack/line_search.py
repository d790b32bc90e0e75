"""Accept a trial that is better, undo one that is not: the step rule of every ascent here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
