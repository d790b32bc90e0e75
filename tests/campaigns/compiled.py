"""Maps through torch.compile: is the truth inside the interval, or is the map refused?

    python -m tests.campaigns.compiled --workers 2 --out compiled.jsonl

Every step of `tests.campaigns.edges` that cancels in place, in complex numbers or through views,
compiled as a function by two backends; a few by inductor, which needs a C++ compiler; modules,
modules compiled in place, functions that call compiled modules, dynamic shapes, whole graphs,
batches, float32 and norm inf. A fault is a truth outside [lower, upper] or an exception other than
UserError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lipscope as ls
from tests.campaigns.edges import EVERY, Draw, Map, Offset, add_in_place, attention, norm, plain
from tests.campaigns.runner import Result, campaign

Case = tuple[str, Callable[[], str]]
TRUE, REFUSED = "right", "refused"


class Layer(nn.Module):
    """Attention whose scores are moved by `step`, which cancels."""

    def __init__(self, draw: Draw, step: Callable[..., Tensor] = add_in_place, c: float = 1e6):
        super().__init__()
        self.A, self.V = (nn.Parameter(draw.normal(3, 3)) for _ in range(2))
        self.step, self.c = step, c

    def forward(self, X: Tensor) -> Tensor:
        return attention(self.A, self.V, self.step, self.c)(X)

    @property
    def exact(self) -> Map:
        return attention(self.A.detach().double(), self.V.detach().double(), plain, 0.0)


class Around(nn.Module):
    """A module that calls a compiled one."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, X: Tensor) -> Tensor:
        return torch.tanh(self.inner(X)) + X


def judge(f: Map, exact: Map, X: Tensor, **options: Any) -> str:
    """Return how the solve of a compiled map ended."""
    try:
        e = ls.local_lipschitz(f, X, solver=ls.Solver(seed=1), **options)
    except ls.UserError as error:
        return f"{REFUSED}: {error}"
    members, inputs = ([e], [X]) if X.ndim == 2 else (list(e), list(X))
    for one, x in zip(members, inputs, strict=True):
        truth = norm(exact, x, str(options.get("norm", "2")))
        if not one.lower <= truth * (1 + 1e-10) or not truth * (1 - 1e-10) <= one.upper:
            return f"FALSE: {truth!r} is not in [{one.lower!r}, {one.upper!r}]"
    return TRUE


def solve(
    seed: int,
    step: Callable[..., Tensor] = add_in_place,
    make: Callable[[Layer], Map] = torch.compile,
    around: bool = False,
    shape: tuple[int, ...] = (4, 3),
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> str:
    torch._dynamo.reset()
    draw = Draw(seed)
    layer = Layer(draw, step).to(dtype)
    X = draw.normal(*shape).to(dtype)
    f, exact = make(layer), layer.exact
    if around:
        return judge(Around(f), lambda x: torch.tanh(exact(x)) + x, X, **options)
    return judge(f, exact, X, **options)


def in_place(layer: Layer, **options: Any) -> Map:
    layer.compile(**options)
    return layer


def function(layer: Layer, **options: Any) -> Map:
    return torch.compile(layer.forward, **options)


def cases() -> Iterator[Case]:
    for backend in ("eager", "aot_eager"):
        for i, step in enumerate(EVERY):
            name = "out=" if step == Offset.apply else step.__name__
            make = partial(function, backend=backend)
            yield f"{backend}, {name}", partial(solve, i, step, make)
    for backend in ("eager", "aot_eager", "inductor"):
        compiled = partial(torch.compile, backend=backend)
        yield f"{backend}, module", partial(solve, 20, make=compiled)
        yield (
            f"{backend}, module in place",
            partial(solve, 21, make=partial(in_place, backend=backend)),
        )
        yield f"{backend}, inside another module", partial(solve, 22, make=compiled, around=True)
    for backend in ("eager", "aot_eager"):
        compiled = partial(torch.compile, backend=backend)
        yield f"{backend}, batch", partial(solve, 23, make=compiled, shape=(3, 4, 3), step=plain)
        yield f"{backend}, float32", partial(solve, 24, make=compiled, dtype=torch.float32)
        yield f"{backend}, norm inf", partial(solve, 25, make=compiled, norm="inf")
        yield f"{backend}, gap", partial(solve, 26, make=compiled, gap=1e-6)
        yield f"{backend}, whole graph", partial(solve, 27, make=partial(compiled, fullgraph=True))
        yield f"{backend}, dynamic", partial(solve, 28, make=partial(compiled, dynamic=True))


CASES = list(cases())


def chunk(number: int) -> Result:
    result = Result()
    name, case = CASES[number]
    try:
        ended = case()
    except Exception as error:  # every other exception is a finding
        ended = f"RAISED {type(error).__name__}: {error}"
    outcome = ended.split(":")[0].split()[0]
    result.count(name, outcome)
    if outcome not in (TRUE, REFUSED):
        result.faults.append(f"{name}: {' '.join(ended.split())}")
    return result


if __name__ == "__main__":
    sys.exit(campaign(chunk, 1, len(CASES), __doc__ or ""))
