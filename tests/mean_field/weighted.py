"""Random weighted measures, and attention on them by plain sums, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

import lipscope as ls
from lipscope.mean_field.measures import DiscreteMeasure, lifted, respond
from tests.naive import naive_layer


def randn(g: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def one_head(A: Tensor | float, V: Tensor | float = 1.0, **options) -> ls.SelfAttention:
    """A layer with scores x_j' A x_i and values V x_j; numbers mean matrices of size 1."""
    A, V = (
        torch.as_tensor(W, dtype=torch.float64).reshape(-1, 1) if isinstance(W, float) else W
        for W in (A, V)
    )
    d = A.shape[1]
    return ls.SelfAttention(
        A, torch.eye(d, dtype=torch.float64), V, kernel=ls.Dot(scale=1.0), **options
    )


def random_weights(g: Generator, n: int) -> Tensor:
    w = torch.rand(n, generator=g, dtype=torch.float64) + 0.05
    return w / w.sum()


def random_case(
    seed: int, n_max: int = 4, d_max: int = 3
) -> tuple[ls.SelfAttention, DiscreteMeasure]:
    """Gaussian A, V and atoms, 1 to n_max atoms in dimension 1 to d_max."""
    g = Generator().manual_seed(seed)
    n = int(torch.randint(1, n_max + 1, (), generator=g))
    d = int(torch.randint(1, d_max + 1, (), generator=g))
    f = one_head(randn(g, d, d), randn(g, d, d))
    return f, DiscreteMeasure(2 * randn(g, n, d), random_weights(g, n))


def line(
    points: list[float], weights: list[float] | None = None, positions: list[float] | None = None
) -> DiscreteMeasure:
    """Atoms on the real line."""
    x = torch.tensor(points, dtype=torch.float64)[:, None]
    w = torch.tensor(weights or [1 / len(points)] * len(points), dtype=torch.float64)
    s = None if positions is None else torch.tensor(positions, dtype=torch.float64)
    return DiscreteMeasure(x, w, s)


def naive_push(f: ls.SelfAttention, mu: DiscreteMeasure, X: Tensor | None = None) -> Tensor:
    """One dot-product head: sum_j w_j e^{S_ij} V x_j / sum_j w_j e^{S_ij} over visible j."""
    X = mu.points if X is None else X
    s = torch.zeros(len(mu)) if mu.positions is None else mu.positions
    E = mu.weights * torch.exp((X @ f.Q.T) @ (X @ f.K.T).T) * (s[None, :] <= s[:, None])
    return (E @ X @ f.V.T) / E.sum(dim=1, keepdim=True)


def dense_derivative(f: ls.SelfAttention, mu: DiscreteMeasure) -> Tensor:
    """W^{1/2} J W^{-1/2} by autograd."""
    J = torch.autograd.functional.jacobian(
        lambda X: naive_push(f, mu, X), mu.points, vectorize=True
    )
    r = mu.weights.sqrt()
    J = r[:, None, None, None] * J / r[None, None, :, None]
    return J.reshape(J.shape[0] * J.shape[1], -1)


def dense_query_norms(f: ls.SelfAttention, mu: DiscreteMeasure) -> Tensor:
    """||V C_i A|| for every atom, from its definition."""
    X, A = mu.points, f.K.T @ f.Q
    s = torch.zeros(len(mu)) if mu.positions is None else mu.positions
    E = mu.weights * torch.exp(X @ A.T @ X.T) * (s[None, :] <= s[:, None])
    P = E / E.sum(dim=1, keepdim=True)
    norms = []
    for p in P:
        Y = X - p @ X
        norms.append(torch.linalg.matrix_norm(f.V @ (Y.T * p) @ Y @ A, 2))
    return torch.stack(norms)


def norm(M: Tensor) -> float:
    return torch.linalg.matrix_norm(M, 2).item()


def plain_tokens(f: ls.SelfAttention, X: Tensor) -> Tensor:
    """f on tokens, from its definition."""
    return naive_layer(f, X)


def velocity(f: ls.SelfAttention, mu: DiscreteMeasure) -> Callable[[Tensor], Tensor]:
    """Gamma_mu as a function of query points [N, d] anywhere; mu has no positions."""
    lift = lifted(f, mu)
    mask = None if lift.mask is None else lift.mask[:1]
    return lambda Z: respond(lift, Z, mu.points, mask)
