"""Derivatives of attention from bfloat16, on demand: rough, and several times as fast on a GPU.

For a search: a solver finds the direction with rough products and measures with exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class Digits:
    """How the derivatives of one graph are computed: exactly, unless a rough product asks.

    used: whether there is attention in the graph
    """

    def __init__(self) -> None:
        self.low_precision = False
        self.used = False
        self._lock = RLock()

    def exact(self, product: Product) -> Product:
        return self._with(product, low_precision=False)

    def in_low_precision(self, product: Product) -> Product:
        return self._with(product, low_precision=True)

    def _with(self, product: Product, low_precision: bool) -> Product:
        # Set for the graph, not for the thread: autograd computes on threads of its own.
        def chosen(x: Tensor) -> Tensor:
            with self._lock:
                before = self.low_precision
                self.low_precision = low_precision
                try:
                    return product(x)
                finally:
                    self.low_precision = before

        return chosen


_current: ContextVar[Digits | None] = ContextVar("digits", default=None)


@contextmanager
def graph_of_any_digits() -> Iterator[Digits]:
    """Derivatives of the attention that is computed inside can be asked for roughly later on."""
    digits = Digits()
    token = _current.set(digits)
    try:
        yield digits
    finally:
        _current.reset(token)


def digits_of_graph() -> Digits | None:
    """Those of the graph that attention becomes part of, where they can be chosen."""
    digits = _current.get()
    if digits is not None:
        digits.used = True
    return digits


def with_digits(digits: Digits | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a derivative, in bfloat16 instead of float32 in low precision."""
    if digits is None or not digits.low_precision or tensors[0].dtype != torch.float32:
        return tensors
    return tuple(x.to(torch.bfloat16) for x in tensors)
