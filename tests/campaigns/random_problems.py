"""Random attention problems of every kind: is sigma right, and between its bounds?

    python -m tests.campaigns.random_problems 100000 --workers 14 --out problems.jsonl

Most truths are enclosures in extended precision (`tests/enclosed.py`), of layers with any mix of
masks, kernels, heads, biases and sizes. A quarter are the families of `tests/test_certificates.py`
in 60 digits: heads and blocks that cancel, extreme scales, measures, compositions, modules through
autograd, float32 and half precision. A fault is

- an exception,
- a truth outside [lower, upper],
- a status that is not ok where nothing is extreme, or
- a value that is off by more than 1e-8 and more than the rounding it states (1 % in float32),
  under a status that is ok.
"""

from __future__ import annotations

import itertools
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import lipscope as ls
from lipscope.nn.contractive import ATTENTIONS
from tests import enclosed
from tests.campaigns.runner import Result, campaign
from tests.cases import KINDS, problem
from tests.test_certificates import ALL, Draw, opposed, sizes

CHUNK = 100
MISS = 1e-8
TOL = 1e-10
WIDE = 1e-3
"""Enclosures wider than this, relatively, are counted: they say little."""
LOWEST = torch.finfo(torch.float64).min

Layer = ls.SelfAttention
Solve = Callable[[], ls.Estimate]


class Problem(NamedTuple):
    """A solve, an enclosure of the number it estimates, and what is asked of the value.

    Attributes:
        solve: Computes the estimate.
        low: At most the truth.
        high: At least the truth.
        miss: The relative error allowed where the status is ok; infinite to judge bounds alone.
        ordinary: Whether nothing is extreme, and the status must be ok.
        smallest: Values below this underflow.
    """

    solve: Solve
    low: float
    high: float
    miss: float = MISS
    ordinary: bool = False
    smallest: float = torch.finfo(torch.float64).tiny


def of_layer(
    draw: Draw, f: Layer, X: Tensor, ordinary: bool = False, miss: float = MISS
) -> Problem:
    """The 2-norm of f at X, with or without a requested gap, alone or in a batch."""
    double = X.dtype == torch.float64
    options = {
        "gap": draw.pick(None, 1e-2, 1e-6) if double else None,
        "tol": TOL if double else 1e-6,
    }
    solve = partial(ls.local_lipschitz, solver=draw.solver(1e-9), **options)

    def alone() -> ls.Estimate:
        return solve(f, X)

    def in_a_batch() -> ls.Estimate:
        return solve(f, torch.stack([X.flip(0), X, 0.5 * X]))[1]

    return Problem(
        solve=in_a_batch if draw.pick(*range(8)) == 0 else alone,
        **enclosed.sigma(enclosed.layer_jacobian(f, X))._asdict(),
        miss=miss,
        ordinary=ordinary,
        smallest=torch.finfo(X.dtype).tiny,
    )


# Kinds: each a function of a Draw.


def named(kind: str, draw: Draw) -> Problem:
    return of_layer(draw, *problem(kind, draw.seed), ordinary=True)


def longer(kind: str, draw: Draw) -> Problem:
    """With up to 40 tokens."""
    f, X = problem(kind, draw.seed)
    n = draw.pick(*range(9, 41))
    return of_layer(draw, f, (X.abs().max() * draw.normal(n, X.shape[1])), ordinary=True)


def mixed_layer(draw: Draw, extreme: bool = False) -> tuple[Layer, Tensor]:
    """Any options together."""
    n, d = draw.pick(1, 2, 2, 3, 3, 4, 5, 6, 8, draw.pick(12, 20, 40)), draw.pick(1, 2, 3, 4, 6, 8)
    heads = draw.pick(1, 1, 2, 3, 4)
    groups = draw.pick(*(g for g in range(1, heads + 1) if heads % g == 0))
    k, m = 2 * draw.pick(1, 2, 3), draw.pick(1, 2, 3, 5)
    shapes = ((heads * k, d), (groups * k, d), (groups * m, d))
    Q, K, V = (draw.normal(*shape) for shape in shapes)
    O = draw.pick(None, draw.normal(draw.pick(1, 3, 6), heads * m))
    biases = draw.pick(None, tuple(draw.normal(len(W)) for W in (Q, K, V)))
    sinks = draw.pick(None, None, 2 * draw.normal(heads))
    softcap = draw.pick(None, None, draw.power(-0.5, 1.5))
    if draw.pick(*range(3)) == 0:
        kernel: ls.Dot | ls.L2 = ls.L2(softcap=softcap, sinks=sinks)
    else:
        rope = draw.pick(None, None, ls.Rope.standard(n, k, base=draw.pick(10.0, 1e4)))
        kernel = ls.Dot(softcap=softcap, sinks=sinks, rope=rope)
    f = Layer(
        draw.power(-1, 1) * Q, K, V, O,
        heads=heads, kv_heads=groups, biases=biases, causal=draw.coin(), kernel=kernel,
        window=draw.pick(None, draw.pick(1, 2, 5)), mask=random_mask(draw, n, extreme),
        padding=draw.pick(None, None, torch.arange(n) < draw.pick(*range(1, n + 1))),
    )  # fmt: skip
    return f, draw.pick(1.0, 1.0, 3.0, 0.1) * draw.normal(n, d)


def random_mask(draw: Draw, n: int, extreme: bool) -> Tensor | None:
    """None, boolean, additive with -inf, or additive with large numbers."""
    seen = draw.normal(n, n) > -0.5
    additive = 3 * draw.normal(n, n)
    choices = [None, seen, torch.where(seen, additive, -math.inf), additive]
    if extreme:
        low = draw.pick(-1e4, -1e9, -1e30, LOWEST)
        rows = additive.clone()
        rows[draw.normal(n) > 0] = low
        choices = [torch.where(seen, additive, low), rows, torch.where(seen, rows, -math.inf)]
    return draw.pick(*choices)


def mixed(draw: Draw) -> Problem:
    return of_layer(draw, *mixed_layer(draw))


def large_masks(draw: Draw) -> Problem:
    return of_layer(draw, *mixed_layer(draw, extreme=True))


def huge_biases(draw: Draw) -> Problem:
    f, X = mixed_layer(draw)
    sizes = [draw.pick(0.0, 1.0, draw.power(0, 12)) for _ in range(3)]
    biases = tuple(s * draw.normal(len(W)) for s, W in zip(sizes, (f.Q, f.K, f.V), strict=True))
    return of_layer(draw, replace(f, biases=biases), X)


def values_of_rank_one(draw: Draw) -> Problem:
    f, X = mixed_layer(draw)
    return of_layer(draw, replace(f, V=draw.power(-8, 8) * f.V[:, :1] * f.V[:1]), X)


def identical_tokens(draw: Draw) -> Problem:
    """All equal, or nearly, near 0 or far."""
    f, X = mixed_layer(draw)
    return of_layer(draw, f, draw.power(-3, 4) * X[:1] + draw.pick(0.0, draw.power(-14, -1)) * X)


def cancelling_heads(draw: Draw) -> Problem:
    return of_layer(draw, *opposed(draw, **sizes(draw)))


def extreme_scales(draw: Draw) -> Problem:
    """Tokens, queries, keys and values from 1e-150 to 1e150; scores mostly stay moderate."""
    f, X = mixed_layer(draw)
    big, split = draw.power(-75, 75), draw.between(0, 2)
    if isinstance(f.kernel, ls.L2):
        split = 1.0  # distances need queries and keys of one size
    if draw.pick(*range(4)) > 0:
        f = replace(f, Q=f.Q * big**-split, K=f.K * big ** (split - 2))
    f = replace(f, V=f.V * draw.pick(1.0, draw.power(-150, 150)))
    return of_layer(draw, f, X * big)


def hardmax(draw: Draw) -> Problem:
    """Low temperatures, and ties of the largest scores that are exact, near or far."""
    f, X = mixed_layer(draw)
    X = X[torch.arange(len(X)) % max(1, len(X) // 2)] + draw.pick(0.0, 1e-9, 1e-3, 1.0) * X
    return of_layer(draw, replace(f, Q=draw.power(0, 6) * f.Q), X)


def single_precision(draw: Draw) -> Problem:
    f, X = mixed_layer(draw, extreme=draw.pick(*range(4)) == 0)
    f = replace(f, Q=draw.power(-1, 1) * f.Q)
    if f.mask is not None and f.mask.dtype != torch.bool:
        f = replace(f, mask=f.mask.clamp_min(torch.finfo(torch.float32).min))
    return of_layer(draw, f.to(torch.float32), X.float(), miss=1e-2)


def single_made_exact(draw: Draw) -> Problem:
    """float32 weights and tokens, recomputed in float64."""
    f, X = mixed_layer(draw)
    f, X = f.to(torch.float32), X.float()
    truth = enclosed.sigma(enclosed.layer_jacobian(f, X))
    solve = partial(ls.local_lipschitz, f, X, TOL, precision="exact", solver=draw.solver(1e-9))
    return Problem(solve, *truth)


def infinity(draw: Draw) -> Problem:
    f, X = mixed_layer(draw)
    truth = enclosed.row_sum(enclosed.layer_jacobian(f, X))
    return Problem(partial(ls.local_lipschitz, f, X, norm="inf"), *truth)


def one_head_of_many(draw: Draw) -> Problem:
    f, X = mixed_layer(draw)
    h = draw.pick(*range(f.heads))
    truth = enclosed.sigma(enclosed.layer_jacobian(f.head(h), X))
    solve = partial(ls.local_lipschitz, f.heads_apart(), X, TOL, solver=draw.solver(1e-9))
    return Problem(lambda: solve()[h], *truth)


def layer_with_a_constant(draw: Draw) -> Problem:
    """The closed form of the layers of lipscope.nn."""
    n, heads, causal = draw.pick(2, 3, 5, 9), draw.pick(1, 2), draw.coin()
    torch.manual_seed(draw.seed)
    layer = ATTENTIONS[draw.pick("dot", "l2", "contractive")](4 * heads, heads, causal).double()
    f, X = layer.as_map(n), draw.power(-1, 1) * draw.normal(n, 4 * heads)
    return of_layer(draw, f.to(torch.float64), X)


def certificates(family: str, draw: Draw) -> Problem:
    """A family in 60 digits, for its bounds alone."""
    estimate, sigma = ALL[family](draw.seed)
    return Problem(partial(estimate, 1e-9), sigma, sigma, math.inf)


OWN: list[Callable[[Draw], Problem]] = [
    mixed, mixed, mixed, large_masks, large_masks, huge_biases, values_of_rank_one,
    identical_tokens, cancelling_heads, extreme_scales, extreme_scales, hardmax, hardmax,
    single_precision, single_precision, single_made_exact, infinity, one_head_of_many,
    layer_with_a_constant,
]  # fmt: skip
SHAPED = ("mask", "padding", "rotary", "token")
LONGER = [kind for kind in KINDS if not any(word in kind for word in SHAPED)]


def schedule() -> list[tuple[str, Callable[[Draw], Problem]]]:
    """The kinds of as many problems in a row: the lists by their shares."""
    own = itertools.cycle([(make.__name__.replace("_", " "), make) for make in OWN])
    cases = itertools.cycle([(kind, partial(named, kind)) for kind in KINDS])
    long = itertools.cycle([(f"{kind}, longer", partial(longer, kind)) for kind in LONGER])
    hard = itertools.cycle([(f"{name}, 60 digits", partial(certificates, name)) for name in ALL])
    shares = [own] * 10 + [cases] * 5 + [long] + [hard] * 4
    return [next(source) for _ in range(100) for source in shares]


SCHEDULE = schedule()


def judged(kind: str, p: Problem, result: Result, where: str) -> None:
    """Compare an estimate with the truth."""
    e = p.solve()
    result.count(kind, "problems")
    if p.high > p.low + WIDE * p.low + p.smallest:
        result.count(kind, "wide truth")
    fault = ""
    if not (e.lower <= p.high and p.low <= e.upper):
        fault = "outside"
    elif p.miss < math.inf:  # the value is judged as well
        off = max(p.low - e.value, e.value - p.high, 0)
        if not e.status.ok:
            result.count(kind, e.status.name.lower())
            fault = "missed" if p.ordinary else ""
        elif not off <= p.miss * p.high + 2 * (e.value - e.lower) + p.smallest:
            fault = "missed"
        elif p.low > p.smallest:
            result.worst[kind] = max(result.worst.get(kind, 0.0), float(off / p.high))
    if fault:
        result.count(kind, fault)
        result.faults.append(f"{where}: {fault}, truth in [{p.low!r}, {p.high!r}], {e}")


def chunk(number: int) -> Result:
    result = Result()
    for i in range(CHUNK * number, CHUNK * (number + 1)):
        kind, make = SCHEDULE[i % len(SCHEDULE)]
        where = f"{kind} {i}"
        try:
            judged(kind, make(Draw(i)), result, where)
        except Exception:
            result.count(kind, "exceptions")
            last = traceback.format_exc().strip().splitlines()
            result.faults.append(f"{where}: {' | '.join(last[-5:])}")
    return result


if __name__ == "__main__":
    sys.exit(campaign(chunk, CHUNK, 100_000, __doc__ or ""))
