"""Maps and layers at the edges of what rounding can be seen in: is the truth inside the interval?

    python -m tests.campaigns.edges 20400 --workers 14 --out edges.jsonl

Twelve classes in turn. Maps through autograd compute attention by steps that cancel exactly in
exact arithmetic: in place, in complex numbers, through views, checkpointed, as a mixture of
experts, with tied weights. Batches and heads in float32 and bfloat16 have a loud member. Norms
for the largest coordinate have cancelling heads, or rows close to the top. Inverses of residuals
have large intermediates. Maps that mix two members of a batch must be refused, others not.

Truths are dense float64 Jacobians of the same map without the steps that cancel, or 50 digits. A
fault is an exception, a truth outside [lower, upper], a mixed batch that is accepted or a map that
is refused without mixing. Statuses that claim nothing (lower 0, upper infinite) are counted.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mpmath
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope.nn.contractive import STEEPEST, of_norm
from tests.campaigns.runner import Result, campaign
from tests.naive import dense_jacobian
from tests.test_certificates import Draw

CHUNK = 24
ACCURACY = 1e-10
"""Relative accuracy of truths in float64: scores are at most of order 30."""

mp = mpmath.mp.clone()
mp.dps = 50
Map = Callable[[Tensor], Tensor]


def solver(draw: Draw) -> ls.Solver:
    return ls.Solver(seed=1_000_003 + draw.seed)


def norm(f: Map, X: Tensor, p: str = "2") -> float:
    """The norm of a dense Jacobian in float64."""
    J = torch.autograd.functional.jacobian(f, X.double()).reshape(-1, X.numel())
    return float(torch.linalg.matrix_norm(J, 2) if p == "2" else J.abs().sum(dim=1).max())


# Steps that add a constant to each row of scores s [n, n] in exact arithmetic: softmax ignores it.


def add_in_place(s: Tensor, c: float) -> Tensor:
    s += c
    return s


def back_and_forth(s: Tensor, c: float) -> Tensor:
    return s.add_(c).sub_(c)


def scaled_in_place(s: Tensor, c: float) -> Tensor:
    return s.mul_(4.0).add_(c).div_(4.0)


def masked_in_place(s: Tensor, c: float) -> Tensor:
    return s.add_(c).masked_fill_(torch.zeros_like(s, dtype=torch.bool), 0.0)


def indexed(s: Tensor, c: float) -> Tensor:
    rows = torch.arange(len(s))
    return s.index_add_(0, rows, torch.full_like(s, c))


def put(s: Tensor, c: float) -> Tensor:
    rows = torch.arange(len(s))
    return s.index_put_((rows,), torch.full_like(s, c), accumulate=True)


def fused(s: Tensor, c: float) -> Tensor:
    return s.addcmul_(torch.full_like(s, c), torch.ones_like(s))


def each(s: Tensor, c: float) -> Tensor:
    torch._foreach_add_([s], c)
    return s


def complex_sum(s: Tensor, c: float) -> Tensor:
    return (torch.complex(s, torch.zeros_like(s)) + c).real


def complex_in_place(s: Tensor, c: float) -> Tensor:
    z = torch.complex(s, s.detach())
    z += complex(c, -c)
    return z.real


def there_and_back(s: Tensor, c: float) -> Tensor:
    z = torch.polar(torch.full_like(s, 1.0), torch.full_like(s, 0.7))
    return ((s * z + c * z) * z.conj()).real


def fourier(s: Tensor, c: float) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(s + c, dim=-1), n=s.shape[-1], dim=-1)


def into_views(s: Tensor, c: float) -> Tensor:
    y = s.new_empty(len(s), 2 * len(s))
    y[:, : len(s)] = s
    y[:, len(s) :] = s
    y[:, : len(s)] += c
    return y[:, : len(s)]


def by_columns(s: Tensor, c: float) -> Tensor:
    y = torch.empty_like(s)
    for j in range(s.shape[1]):
        y[:, j].copy_(s[:, j] + c)
    return y


def transposed(s: Tensor, c: float) -> Tensor:
    t = s.clone().t()
    t.narrow(0, 0, len(s) // 2).add_(c)
    t.narrow(0, len(s) // 2, len(s) - len(s) // 2).add_(c)
    return t.t()


class Offset(torch.autograd.Function):
    """s + c, written into memory given as out=."""

    @staticmethod
    def forward(ctx, s: Tensor, c: float) -> Tensor:
        y = torch.empty_like(s)
        return torch.add(s, c, out=y)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g.clone(), None


STEPS = {
    "in place": (
        add_in_place,
        back_and_forth,
        scaled_in_place,
        masked_in_place,
        indexed,
        put,
        fused,
        each,
    ),
    "complex": (complex_sum, complex_in_place, there_and_back, fourier),
    "views": (into_views, by_columns, transposed, Offset.apply),
}
EVERY = tuple(step for steps in STEPS.values() for step in steps)


def attention(A: Tensor, V: Tensor, step: Callable[[Tensor, float], Tensor], c: float) -> Map:
    def f(X: Tensor) -> Tensor:
        s = step(X @ A.to(X) @ X.mT, c)
        return torch.softmax(s, -1) @ X @ V.to(X)

    return f


def plain(s: Tensor, c: float) -> Tensor:
    return s


def judged(kind: str, e: ls.Estimate, truth: float, accuracy: float, result: Result) -> None:
    """Count one interval, and a fault if the truth is not in it."""
    claims = e.lower > 0 or e.upper < math.inf
    result.count(kind, "claimed" if claims else "not claimed")
    slack = accuracy * abs(truth)
    if e.lower > truth + slack or e.upper < truth - slack:
        result.count(kind, "false")
        result.faults.append(f"{kind}: {truth!r} is not in [{e.lower!r}, {e.upper!r}], {e.status}")


def measured(draw: Draw, f: Map, twin: Map, X: Tensor, kind: str, result: Result) -> None:
    single = draw.pick(False, False, True)
    X = X.float() if single else X
    gap = None if single else draw.pick(None, 0.01, 1e-6)
    e = ls.local_lipschitz(f, X, gap=gap, solver=solver(draw))
    judged(kind, e, norm(twin, X), ACCURACY, result)


def offset(draw: Draw) -> float:
    return draw.pick(-1.0, 1.0) * draw.power(0, 10)


def steps(kind: str, draw: Draw, result: Result) -> None:
    n, d = draw.pick(2, 3, 4, 5), draw.pick(1, 2, 3)
    A, V, X = draw.normal(d, d), draw.normal(d, d), draw.normal(n, d)
    f = attention(A, V, draw.pick(*STEPS[kind]), offset(draw))
    measured(draw, f, attention(A, V, plain, 0.0), X, kind, result)


def checkpointed(draw: Draw, result: Result) -> None:
    n, d = draw.pick(2, 3, 4), draw.pick(2, 3)
    A, V, X = draw.normal(d, d), draw.normal(d, d), draw.normal(n, d)
    inner = attention(A, V, draw.pick(*EVERY), offset(draw))
    f = partial(checkpoint, inner, use_reentrant=False)
    measured(draw, f, attention(A, V, plain, 0.0), X, "checkpointed", result)


def experts(draw: Draw, result: Result) -> None:
    """Each token through its two best experts; the sum is collected in place, on top of c."""
    n, d, count = draw.pick(2, 3, 4, 6), draw.pick(2, 3), draw.pick(2, 3, 4)
    W, R, X = draw.normal(count, d, d), draw.normal(d, count), draw.normal(n, d)

    def mixture(c: float, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(x @ R.to(x), -1).topk(2, dim=-1)
        total = torch.full_like(x, c)
        for k in range(count):
            token, place = torch.where(chosen == k)
            out = torch.tanh(x[token] @ W[k].to(x)) * weights[token, place, None]
            total.index_add_(0, token, out)
        total -= c
        return torch.sin(total)

    size = draw.power(0, 8)
    measured(draw, partial(mixture, size), partial(mixture, 0.0), X, "experts", result)


def tied(draw: Draw, result: Result) -> None:
    """Two layers with the same weights, and W with its transpose after them."""
    n, d = draw.pick(2, 3, 4), draw.pick(2, 3)
    A, V, W, X = draw.normal(d, d), draw.normal(d, d), draw.normal(d, 2 * d), draw.normal(n, d)

    def network(layer: Map, x: Tensor) -> Tensor:
        y = torch.tanh(layer(torch.tanh(layer(x))))
        return y @ W.to(y) @ W.to(y).mT

    f = attention(A, V, draw.pick(*EVERY), draw.pick(-1, 1) * draw.power(0, 8))
    twin = partial(network, attention(A, V, plain, 0.0))
    measured(draw, partial(network, f), twin, X, "tied", result)


def loud(dtype: torch.dtype, heads_apart: bool, draw: Draw, result: Result) -> None:
    """Two sequences of very different sizes, with more tokens than are compared in full."""
    kind = f"{'heads' if heads_apart else 'batch'} {str(dtype).removeprefix('torch.')}"
    d, heads = 2, draw.pick(2, 3) if heads_apart else draw.pick(1, 2)
    Q, K, V = (draw.normal(2 * heads, d) for _ in range(3))
    Q[2:] *= draw.pick(1.0, draw.power(-3, 1))
    V[2:] *= draw.pick(1.0, draw.power(-3, 3))
    few = draw.pick(True, False)
    n = draw.pick(66, 200, 500) if few else draw.pick(66, 72)
    X = torch.stack([draw.normal(n, d), draw.normal(n, d)])
    size = draw.power(0, 3.5)
    X[0] *= size * draw.power(-1, 1.5)
    real = torch.arange(n)
    options = {"causal": draw.pick(True, False)}
    if few:
        # The second sequence has two tokens, whose large scores a mask cancels: its rounding is in
        # two rows, which the first sequence knows nothing of.
        real = torch.randperm(n, generator=draw.g)[:2].sort().values
        X[1] *= size
        Q, K, V, X = (x.to(dtype).double() for x in (Q, K, V, X))
        score = (X[1] @ Q[:2].mT) @ (X[1] @ K[:2].mT).mT / math.sqrt(2)
        mask = torch.stack([torch.zeros(n, n, dtype=torch.float64), draw.normal(n, n) - score])
        padding = torch.ones(2, n, dtype=torch.bool)
        padding[1] = False
        padding[1, real] = True
        options = {"mask": mask.to(dtype), "padding": padding}
    f = ls.SelfAttention(Q.to(dtype), K.to(dtype), V.to(dtype), heads=heads, **options)
    X = X.to(dtype)
    e = ls.local_lipschitz(f.heads_apart() if heads_apart else f, X, tol=1e-3, solver=solver(draw))
    exact = f.double()
    if few:
        short = f.mask[1][real][:, real].double()
        exact = replace(exact, mask=short, padding=None)
    J = dense_jacobian(exact, X[1, real].double())
    if not heads_apart:
        judged(kind, e[1], float(torch.linalg.matrix_norm(J, 2)), ACCURACY, result)
        return
    for h, block in enumerate(J.reshape(len(real), heads, 2, -1).unbind(1)):
        truth = float(torch.linalg.matrix_norm(block.flatten(0, 1), 2))
        judged(kind, e[heads + h], truth, ACCURACY, result)


def largest_coordinate(draw: Draw, result: Result) -> None:
    kind = "largest coordinate"
    if draw.pick(True, False):
        # Two heads that nearly cancel.
        n, d, k = draw.pick(2, 4, 6), draw.pick(2, 3), 2
        dtype = draw.pick(torch.float32, torch.float32, torch.bfloat16, torch.float64)
        Q, K, V = draw.normal(k, d), draw.normal(k, d), draw.normal(d, d)
        near = Q + draw.power(-7, -2) * draw.normal(k, d)
        O = torch.cat([torch.eye(d), -torch.eye(d)], dim=1)
        weights = torch.cat([Q, near]), torch.cat([K, K]), torch.cat([V, V]), O
        f = ls.SelfAttention(*(W.double().to(dtype) for W in weights), heads=2)
        X = draw.normal(n, d).to(dtype)
        exact = f.double()
        truth = float(dense_jacobian(exact, X.double()).abs().sum(dim=1).max())
        judged(kind, ls.local_lipschitz(f, X, norm="inf"), truth, 1e-6, result)
        return
    # Rows of almost the same sum, of which some pass through large numbers.
    count, size = draw.pick(2, 3, 5), draw.power(4, 9)
    Y = (1 + draw.power(-12, -6) * draw.normal(count)) * 1.2345
    rough = [draw.pick(True, False) for _ in range(count)]

    def rows(rough: list[bool], x: Tensor) -> Tensor:
        columns = []
        for y, lost in zip(x.unbind(-1), rough, strict=True):
            z = (y + size) - size if lost else y
            columns.append(z.square())
        return torch.stack(columns, dim=-1)

    X = draw.pick(Y, Y.float())[None]
    e = ls.local_lipschitz(partial(rows, rough), X, norm="inf")
    judged(kind, e, norm(partial(rows, [False] * count), X, "inf"), 1e-14, result)


class Contraction(nn.Module):
    """constant W2 tanh(W1 x + b) + offset, W1 and W2 of norm one."""

    def __init__(self, draw: Draw, d: int, size: float):
        super().__init__()
        self.constant = draw.pick(0.1, 0.5, 0.9)
        self.up, self.down = (
            nn.Parameter(0.999 * W / torch.linalg.matrix_norm(W, 2))
            for W in (draw.normal(4, d), draw.normal(d, 4))
        )
        self.bias = nn.Parameter(size * draw.normal(4))
        self.shift = draw.pick(0.0, size)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.up.mT + self.bias
        hidden = (hidden + self.shift) - self.shift
        return self.constant * (torch.sin(hidden) @ self.down.mT)

    def exactly(self, x):
        up, down, bias = (mp.matrix(W.double().tolist()) for W in (self.up, self.down, self.bias))
        hidden = x * up.T
        for i in range(hidden.rows):
            for j in range(hidden.cols):
                hidden[i, j] = mp.sin(hidden[i, j] + bias[j])
        return mp.mpf(self.constant) * (hidden * down.T)


class Wide(nn.Module):
    """A ContractiveMLP with large biases, and the same with its stored numbers in 50 digits."""

    def __init__(self, draw: Draw, d: int, size: float):
        super().__init__()
        self.constant = draw.pick(0.1, 0.5, 0.9)
        torch.manual_seed(draw.seed)
        self.mlp = ls.nn.ContractiveMLP(d, 4, constant=self.constant).double()
        with torch.no_grad():
            self.mlp.up.bias.copy_(size * draw.normal(4))
            self.mlp.offset.sub_(self.mlp(torch.zeros(1, d, dtype=torch.float64))[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)

    def exactly(self, x):
        mlp = self.mlp.double()
        up = of_norm(1.0, mlp.up.weight)
        down = of_norm(self.constant / STEEPEST, mlp.down.weight)
        bias, off = (mp.matrix(b.tolist()) for b in (mlp.up.bias, mlp.offset))
        y = x * mp.matrix(up.tolist()).T
        for i in range(y.rows):
            for j in range(y.cols):
                z = y[i, j] + bias[j]
                y[i, j] = z * mp.ncdf(z)
        out = y * mp.matrix(down.tolist()).T
        for i in range(out.rows):
            for j in range(out.cols):
                out[i, j] += off[j]
        return out


def inverses(draw: Draw, result: Result) -> None:
    kind, d = "inverses", draw.pick(1, 2, 3)
    g = draw.pick(Contraction, Wide)(draw, d, draw.power(0, 10))
    dtype = draw.pick(torch.float64, torch.float64, torch.float32)
    residual = ls.nn.InvertibleResidual(g).to(dtype)
    y = draw.normal(draw.pick(1, 2), d).to(dtype)
    found = residual.inverse(y)
    target = mp.matrix(y.double().tolist())
    x = mp.matrix(found.value.double().tolist())
    for _ in range(int(60 / -math.log10(g.constant)) + 5):
        x = target - g.exactly(x)
    off = mp.matrix(found.value.double().tolist()) - x
    error = mp.sqrt(sum(z * z for z in off))
    result.count(kind, "claimed" if found.error_bound.isfinite() else "not claimed")
    ratio = float(error / mp.mpf(float(found.error_bound)))
    result.worst[kind] = max(result.worst.get(kind, 0.0), ratio)
    if ratio > 1:
        result.count(kind, "false")
        result.faults.append(f"{kind}: an error of {ratio:.3g} times its bound, {g}, {dtype}")


def mixing(draw: Draw, result: Result) -> None:
    kind, members = "mixing", draw.pick(2, 3, 4, 5, 6, 7, 8, 12, 16)
    i = draw.pick(*range(members))
    j = draw.pick(*(k for k in range(members) if k != i))
    dtype = draw.pick(torch.float64, torch.float64, torch.float32)
    scales = torch.tensor([draw.pick(1.0, draw.power(-4, 4)) for _ in range(members)], dtype=dtype)
    way = draw.pick("sum", "difference", "swap", "product", "none", "none")

    def f(X: Tensor) -> Tensor:
        Y = torch.sin(X) * scales[:, None, None]
        if way == "none":
            return Y
        Z = Y.clone()
        if way == "swap":
            Z[i], Z[j] = Y[j], Y[i]
        elif way == "product":
            Z[i] = Y[i] * (1 + Y[j])
        else:
            Z[i] = Y[i] + (Y[j] if way == "sum" else -Y[j])
        return Z

    X = draw.normal(members, 2, 2).to(dtype)
    try:
        e = ls.local_lipschitz(f, X, solver=solver(draw))
        outcome = "right" if way == "none" else "false"
        truth = (scales[:, None, None] * X.cos()).abs().double().flatten(1).amax(1)
        if outcome == "right" and bool((e.lower > truth * (1 + 1e-6)).any()):
            outcome = "false"
    except ls.UserError as error:
        outcome = "refused" if way != "none" and "mixes the members" in str(error) else "false"
    result.count(kind, outcome)
    if outcome == "false":
        result.faults.append(f"{kind}: {way} of {i} and {j} of {members}, {dtype}, {scales}")


CLASSES: tuple[Callable[[Draw, Result], None], ...] = (
    partial(steps, "in place"),
    partial(steps, "complex"),
    partial(steps, "views"),
    checkpointed,
    experts,
    tied,
    partial(loud, torch.float32, False),
    partial(loud, torch.bfloat16, False),
    partial(loud, torch.float32, True),
    largest_coordinate,
    inverses,
    mixing,
)


def chunk(number: int) -> Result:
    result = Result()
    for seed in range(number * CHUNK, (number + 1) * CHUNK):
        case = CLASSES[seed % len(CLASSES)]
        try:
            case(Draw(seed), result)
        except Exception:  # every exception is a finding
            result.count("exceptions", "raised")
            result.faults.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    return result


if __name__ == "__main__":
    sys.exit(campaign(chunk, CHUNK, 20400, __doc__.splitlines()[0]))
