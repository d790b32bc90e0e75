"""Named attention problems: a table of kinds, each a layer and an input from a generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor

import lipscope as ls

Problem = tuple[ls.SelfAttention, Tensor]


def _randn(g: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _int(g: Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=g))


def plain(
    g: Generator, heads: int = 1, groups: int | None = None, project: bool = False, **options
) -> Problem:
    """Gaussian weights and tokens, d, k, m from 1 to 6, n from 2 to 8, scores of 0.1 to 10."""
    groups = groups or heads
    d, k, m, n = _int(g, 1, 6), 2 * _int(g, 1, 3), _int(g, 1, 5), _int(g, 2, 8)
    size = 10 ** float(torch.rand((), generator=g) * 2 - 1)
    Q, K, V = size * _randn(g, heads * k, d), _randn(g, groups * k, d), _randn(g, groups * m, d)
    O = _randn(g, _int(g, 1, 6), heads * m) if project else None
    return ls.SelfAttention(Q, K, V, O, heads=heads, kv_heads=groups, **options), _randn(g, n, d)


def _with(
    change: Callable[[Generator, ls.SelfAttention, Tensor], Problem], **options
) -> Callable[[Generator], Problem]:
    return lambda g: change(g, *plain(g, **options))


def _clustered(g, f, X):
    centres = _randn(g, 2, X.shape[1])
    return f, centres[torch.randint(0, 2, (X.shape[0],), generator=g)] + 1e-3 * X


def _duplicated(g, f, X):
    return f, X[torch.randint(0, 2, (X.shape[0],), generator=g)]


def _rank_one(g, f, X):
    def flat(W: Tensor) -> Tensor:
        return W[:, :1] * W[:1]

    return replace(f, Q=flat(f.Q), K=flat(f.K), V=flat(f.V)), X


def _uniform(g, f, X):
    """Equal weights and orthogonal values: the largest singular value is repeated d times."""
    d = X.shape[1]
    V = torch.linalg.qr(_randn(g, d, d))[0]
    return ls.SelfAttention(torch.zeros(2, d).double(), torch.zeros(2, d).double(), V), X


def _scaled(**factors: float) -> Callable[[Generator, ls.SelfAttention, Tensor], Problem]:
    def change(g, f, X):
        weights = {name: getattr(f, name) * s for name, s in factors.items() if name != "X"}
        return replace(f, **weights), X * factors.get("X", 1.0)

    return change


def _masked(kind: str) -> Callable[[Generator, ls.SelfAttention, Tensor], Problem]:
    def change(g, f, X):
        n = X.shape[0]
        seen = torch.rand(n, n, generator=g) > 0.4
        if kind == "boolean":
            seen |= torch.eye(n, dtype=torch.bool)
        if kind == "empty rows":
            seen[: (n + 1) // 2] = False
        if kind == "additive":
            return replace(f, mask=torch.where(seen, 3 * _randn(g, n, n), -torch.inf)), X
        if kind == "padding":
            return replace(f, padding=torch.arange(n) < _int(g, 1, n)), X
        return replace(f, mask=seen), X

    return change


def _tied(g, f, X):
    return replace(f, K=f.Q, kv_heads=None, kernel=ls.L2()), X


def _sinks(g, f, X):
    return replace(f, kernel=ls.Dot(sinks=2 * _randn(g, f.heads))), X


def _rope(g, f, X):
    return replace(f, kernel=ls.Dot(rope=ls.Rope.standard(X.shape[0], f.Q.shape[0] // f.heads))), X


def _biases(g, f, X):
    return replace(f, biases=tuple(_randn(g, W.shape[0]) for W in (f.Q, f.K, f.V))), X


def _same(g, f, X):
    return f, X


KINDS: dict[str, Callable[[Generator], Problem]] = {
    "gaussian": _with(_same),
    "one token": _with(lambda g, f, X: (f, X[:1])),
    "clustered tokens": _with(_clustered),
    "duplicated tokens": _with(_duplicated),
    "offset tokens": _with(lambda g, f, X: (f, X + 100)),
    "zero values": _with(_scaled(V=0.0)),
    "zero input": _with(_scaled(X=0.0)),
    "rank one": _with(_rank_one),
    "repeated singular values": _with(_uniform),
    "saturated": _with(_scaled(Q=1e4)),
    "saturated, multi-head": _with(_scaled(Q=1e4), heads=3, project=True),
    "uniform weights": _with(_scaled(Q=1e-9)),
    "tiny input": _with(_scaled(X=1e-160)),
    "huge values": _with(_scaled(V=1e160)),
    "tiny values": _with(_scaled(V=1e-160)),
    "huge output projection": _with(_scaled(O=1e160), heads=2, project=True),
    "tiny output projection": _with(_scaled(O=1e-160), heads=2, project=True),
    "huge values, tiny projection": _with(_scaled(V=1e160, O=1e-160), heads=2, project=True),
    "causal": _with(_same, causal=True),
    "causal, window": _with(_same, causal=True, window=2),
    "boolean mask": _with(_masked("boolean")),
    "fully masked rows": _with(_masked("empty rows")),
    "additive mask": _with(_masked("additive"), heads=2),
    "padding": _with(_masked("padding"), heads=2, project=True),
    "multi-head": _with(_same, heads=3),
    "multi-head, projected": _with(_same, heads=2, project=True),
    "grouped keys": _with(_same, heads=4, groups=2, project=True),
    "one key head": _with(_biases, heads=3, groups=1, causal=True),
    "biases": _with(_biases, heads=2, project=True),
    "rotary": _with(_rope, heads=2, groups=1, project=True),
    "rotary, biases": _with(lambda g, f, X: _rope(g, *_biases(g, f, X)), heads=2, causal=True),
    "softcap": _with(lambda g, f, X: (replace(f, kernel=ls.Dot(softcap=2.0)), X), heads=2),
    "sinks": _with(_sinks, heads=2, project=True),
    "L2": _with(_tied, heads=2),
    "L2, causal": _with(_tied, causal=True),
    "L2, far tokens": _with(lambda g, f, X: _tied(g, f, 30 * X)),
}


def problem(kind: str, seed: int) -> Problem:
    """The seed-th problem of a kind."""
    return KINDS[kind](Generator().manual_seed(1000003 * seed + sorted(KINDS).index(kind)))
