"""Flows that tests share, and an independent reference: dense in numpy, integrated by scipy."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import numpy as np
import torch
from scipy.integrate import solve_ivp

import lipscope as ls


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@contextmanager
def types_unchecked() -> Iterator[None]:
    """As a user calls the library: what has the wrong type is ours to refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def identity(d: int = 2, causal: bool = False, scale: float = 1.0) -> ls.SelfAttention:
    """V = I and scores scale <x_i, x_j>."""
    I = torch.eye(d, dtype=torch.float64)
    return ls.SelfAttention(I, I, I, causal=causal, kernel=ls.Dot(scale=scale))


def random_head(d: int = 3, seed: int = 0, **options) -> ls.SelfAttention:
    return ls.SelfAttention(
        draw(2, d, seed=seed), draw(2, d, seed=seed + 1), draw(d, d, seed=seed + 2), **options
    )


def two_heads(d: int = 3, kernel: object = None, causal: bool = False) -> ls.SelfAttention:
    """Two query heads on one head of keys and values, with biases and an output matrix."""
    biases = (draw(4, seed=11), draw(2, seed=12), draw(2, seed=13))
    Q, K, V, O = draw(4, d, seed=7), draw(2, d, seed=8), draw(2, d, seed=9), draw(d, 4, seed=10) / 2
    return ls.SelfAttention(Q, K, V, O, 2, 1, biases, causal, kernel=kernel or ls.Dot())


def velocity(f: ls.SelfAttention, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Gamma_mu at its own atoms, by the definition, head by head."""
    n = len(x)
    Q, K, V = (
        W.numpy().reshape(count, -1, W.shape[1])
        for W, count in ((f.Q, f.heads), (f.K, f.groups), (f.V, f.groups))
    )
    biases = [None if b is None else b.numpy() for b in f.biases or (None,) * 3]
    out = []
    for h in range(f.heads):
        g = h * f.groups // f.heads
        q, k, v = x @ Q[h].T, x @ K[g].T, x @ V[g].T
        size = q.shape[1]
        if biases[0] is not None:
            q = q + biases[0][h * size : (h + 1) * size]
            k = k + biases[1][g * size : (g + 1) * size]
            v = v + biases[2][g * v.shape[1] : (g + 1) * v.shape[1]]
        scale = size**-0.5 if f.kernel.scale is None else f.kernel.scale
        S = scale * q @ k.T
        if isinstance(f.kernel, ls.L2):
            S = -scale * ((q[:, None] - k[None]) ** 2).sum(-1)
        if f.causal:
            S = np.where(np.tril(np.ones((n, n), dtype=bool)), S, -np.inf)
        P = weights * np.exp(S - S.max(axis=1, keepdims=True))
        out.append(P / P.sum(axis=1, keepdims=True) @ v)
    joined = np.concatenate(out, axis=1)
    return joined if f.O is None else joined @ f.O.numpy().T


def truth(
    f: ls.SelfAttention, X: torch.Tensor, times: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Positions [T, n, d] by scipy's order-8 method, to 1e-12."""
    w = np.ones(len(X)) if weights is None else weights
    solved = solve_ivp(
        lambda t, y: velocity(f, y.reshape(X.shape), w).ravel(),
        (0, times[-1]),
        X.numpy().ravel(),
        method="DOP853",
        t_eval=times,
        rtol=1e-12,
        atol=1e-12,
    )
    return solved.y.T.reshape(len(times), *X.shape)
