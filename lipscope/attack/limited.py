"""Token searches that end in time, report progress, and keep the best text when stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipscope.attack.tokens import Swapped, TextTarget, swapped

TokenSearch = Callable[[TextTarget, Sequence[int]], Swapped]


class TimeUp(BaseException):
    """Ends a search; not an Exception, so that no handler of errors inside a model swallows it."""


PRODUCTS = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.nn.functional.linear,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
}
"""Operations that may be ended. Not all of torch: leaving a torch.no_grad() is a function too."""


class Deadline(TorchFunctionMode):
    """Raises TimeUp from the first matrix product that starts after a moment.

    A single step of a search may be a solve of minutes: between steps would be too late.
    """

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and time.monotonic() > self.until:
            raise TimeUp
        return func(*args, **(kwargs or {}))


def search_until(
    search: TokenSearch,
    target: TextTarget,
    ids: Sequence[int],
    *,
    until: float = math.inf,
    part: int = 16,
    report: Callable[[int], None] = lambda measured: None,
) -> tuple[Swapped | None, bool]:
    """Run a search for texts; at `until`, or at Ctrl-C, take the best text measured so far.

    Args:
        search: The search.
        target: What it maximises.
        ids: The text it starts from.
        until: When to stop, on the clock of `time.monotonic`.
        part: Texts measured at a time; a Ctrl-C loses at most these.
        report: Called with the number of texts measured so far.

    Returns:
        The text found, None if not even the original was measured, and whether Ctrl-C came.
    """
    original = torch.tensor(list(ids))
    before = math.nan
    measured = 0
    best: tuple[float, Tensor] = (-math.inf, original)

    def measure(texts: Tensor) -> Tensor:
        nonlocal before, measured, best
        values = []
        for some in texts.split(part):
            values.append(target.measure(some))
            top = int(values[-1].argmax())
            best = max(best, (values[-1][top].item(), some[top]), key=lambda pair: pair[0])
            if math.isnan(before) and torch.equal(some[0], original):
                before = values[-1][0].item()
            measured += len(some)
            report(measured)
        return torch.cat(values)

    interrupted = False
    try:
        with nullcontext() if until == math.inf else Deadline(until):
            return search(replace(target, measure=measure), ids), False
    except TimeUp:
        pass
    except KeyboardInterrupt:
        interrupted = True
    if math.isnan(before):
        return None, interrupted
    found = swapped("", ids, best[1], before, best[0], measured)
    return replace(found, stopped=True), interrupted
