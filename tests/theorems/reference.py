"""The certificate of docs/theory/certified.md in 50 digits, from the formulas, for one head."""

from __future__ import annotations

import mpmath as mp
from torch import Tensor

import lipscope as ls

DIGITS = 50


def second_derivative_bound(f: ls.SelfAttention, X: Tensor, rho: float) -> mp.mpf:
    """The formula without rounding: what the float64 evaluation must not fall below."""
    with mp.workdps(DIGITS):
        return _bound(f, X, mp.mpf(rho))


def certificate(
    f: ls.SelfAttention, X: Tensor, r: float, steps: int
) -> tuple[mp.mpf, mp.mpf, mp.mpf]:
    """||D_X f||, the right Riemann sum of B up to r, and the interval bound, without rounding."""
    with mp.workdps(DIGITS):
        radii = [mp.mpf(r) * (i + 1) / steps for i in range(steps)]
        rise = sum(_bound(f, X, rho) for rho in radii) * mp.mpf(r) / steps
        return _norm(_jacobian(f, X)), rise, _bound(f, X, mp.mpf(r), _interval)


def _exact(M: Tensor) -> mp.matrix:
    return mp.matrix([[mp.mpf(x) for x in row] for row in M.tolist()])


def _norm(M: mp.matrix) -> mp.mpf:
    return max(mp.svd_r(M, compute_uv=False))


def _length(v: list) -> mp.mpf:
    return mp.sqrt(sum(x * x for x in v))


def _apply(M: mp.matrix, v: list) -> list:
    return list(M * mp.matrix(v))


def _dot(x: list, y: list) -> mp.mpf:
    return sum(a * b for a, b in zip(x, y, strict=True))


def _stack(weights: list, vectors: list) -> mp.mpf:
    """||(sqrt(w_j) v_j)_j||."""
    return _norm(
        mp.matrix([[mp.sqrt(w) * x for x in v] for w, v in zip(weights, vectors, strict=True)])
    )


def _at(f: ls.SelfAttention, X: Tensor):
    """A, V, who sees whom, b_i, P, and tokens less the mean of each row."""
    Q, K, V = _exact(f.Q), _exact(f.K), _exact(f.V)
    A = K.T * Q / mp.sqrt(Q.rows)
    bq = f.biases[0] if f.biases is not None else None
    beta = [0] * X.shape[1] if bq is None else list(K.T * _exact(bq[:, None]) / mp.sqrt(Q.rows))
    x = [[mp.mpf(v) for v in row] for row in X.tolist()]
    N = range(len(x))
    seen = [[j <= i or not f.causal for j in N] for i in N]
    b = [[p + q for p, q in zip(_apply(A, xi), beta, strict=True)] for xi in x]
    P = [_softmax([_dot(b[i], x[j]) if seen[i][j] else None for j in N]) for i in N]
    mean = [[sum(P[i][j] * x[j][c] for j in N) for c in range(len(x[0]))] for i in N]
    away = [[[p - q for p, q in zip(x[j], mean[i], strict=True)] for j in N] for i in N]
    return A, V, seen, b, P, away


def _jacobian(f: ls.SelfAttention, X: Tensor) -> mp.matrix:
    """J_ij = V [ delta_ij C_i A + P_ij (I + (x_j - m_i) b_i') ]."""
    A, V, _, b, P, away = _at(f, X)
    n, d, m = len(P), A.rows, V.rows
    J = mp.matrix(n * m, n * d)
    for i in range(n):
        C = mp.matrix(d, d)
        for j in range(n):
            y = mp.matrix(away[i][j])
            C += P[i][j] * y * y.T
        for j in range(n):
            block = V * (
                P[i][j] * (mp.eye(d) + mp.matrix(away[i][j]) * mp.matrix(b[i]).T)
                + (C * A if i == j else 0 * C)
            )
            for p in range(m):
                for q in range(d):
                    J[i * m + p, j * d + q] = block[p, q]
    return J


def _bound(f: ls.SelfAttention, X: Tensor, rho: mp.mpf, assemble=None) -> mp.mpf:
    A, V, seen, b, P, away = _at(f, X)
    N = range(len(P))
    Ax = [[_apply(A.T, y) for y in row] for row in away]
    Vx = [[_apply(V, y) for y in row] for row in away]
    a, v = _norm(A), _norm(V)
    W = [_weights(P[i], b[i], Ax[i], seen[i], i, a, rho) for i in N]
    return (assemble or _assemble)(W, b, Ax, Vx, seen, a, v, rho)


def _interval(W, b, Ax, Vx, seen, a, v, rho) -> mp.mpf:
    """I(rho): the three blocks over the whole ball."""
    N = range(len(W))
    pi = [mp.sqrt(max(row)) for row in W]
    sigma = [_stack(W[i], Vx[i]) + v * pi[i] * rho for i in N]
    q = [_stack(W[i], Ax[i]) + a * pi[i] * rho for i in N]
    weights = min(_norm(mp.matrix(W)), mp.sqrt(max(sum(W[i][j] for i in N) for j in N)))
    keys = max(_stack([W[i][j] * sigma[i] ** 2 for i in N], b) for j in N) + a * rho * max(
        sigma[i] * pi[i] for i in N
    )
    return max(sigma[i] * q[i] for i in N) + v * weights + keys


def _softmax(scores: list) -> list:
    e = [mp.mpf(0) if s is None else mp.exp(s) for s in scores]
    return [y / sum(e) for y in e]


def _weights(P: list, b: list, Ax: list, seen: list, i: int, a: mp.mpf, rho: mp.mpf) -> list:
    """P-bar, row i."""
    N = range(len(P))
    delta = [rho * mp.sqrt(_dot(b, b) + _dot(y, y)) + a * rho**2 / 2 for y in Ax]
    delta[i] = rho * _length([p + q for p, q in zip(b, Ax[i], strict=True)]) + a * rho**2
    high = [P[j] * mp.exp(delta[j]) for j in N]
    low = [P[j] * mp.exp(-delta[j]) for j in N]
    jensen = mp.exp(_length(b) * _length(P) * rho + a * rho**2)
    most = [
        min(high[j] / (high[j] + sum(low) - low[j]), high[j] * jensen) if seen[j] else mp.mpf(0)
        for j in N
    ]
    return [min(w, mp.mpf(1)) for w in most]


def _assemble(W, b, Ax, Vx, seen, a, v, rho) -> mp.mpf:
    N = range(len(W))
    root = [[mp.sqrt(w) for w in row] for row in W]
    pi = [max(row) for row in root]
    bar = [_length(y) + a * rho for y in b]
    far_v = [[_length(Vx[i][j]) if seen[i][j] else mp.mpf(0) for j in N] for i in N]
    far_a = [[_length(Ax[i][j]) if seen[i][j] else mp.mpf(0) for j in N] for i in N]
    size_v, size_a = [_stack(W[i], Vx[i]) for i in N], [_stack(W[i], Ax[i]) for i in N]
    sigma = [size_v[i] + v * pi[i] * rho for i in N]
    q = [size_a[i] + a * pi[i] * rho for i in N]
    tau = [mp.sqrt((pi[i] * bar[i]) ** 2 + (root[i][i] * bar[i] + q[i]) ** 2) for i in N]
    k_b = max(_stack([W[i][j] for i in N], b) for j in N) + a * max(pi) * rho
    T = k_b + max(q)
    e_v = [rho * (v * pi[i] + sigma[i] * tau[i]) for i in N]
    e_a = [rho * (a * pi[i] + q[i] * tau[i]) for i in N]
    row = [_length(w) for w in W]
    whole = _norm(mp.matrix(W))
    query = mp.mpf(0)
    for i in N:
        G = mp.matrix(len(W), len(W))
        for j in N:
            for k in N:
                G[j, k] = (
                    root[i][j] * root[i][k] * _dot(Vx[i][j], Vx[i][k]) * _dot(Ax[i][j], Ax[i][k])
                )
        core = min(mp.sqrt(_norm(G)), max(far_v[i]) * size_a[i], max(far_a[i]) * size_v[i])
        shifts = v * rho * max(root[i][j] * far_a[i][j] for j in N) + a * rho * max(
            root[i][j] * far_v[i][j] for j in N
        )
        cumulant = core + shifts + v * a * rho**2 * pi[i] + sigma[i] * e_a[i] + e_v[i] * q[i]
        query = max(query, v * pi[i] * q[i] + sigma[i] * pi[i] * a + tau[i] * cumulant)
    values = v * min(max(pi) * T, mp.sqrt(max(sum(W[i][j] * tau[i] ** 2 for i in N) for j in N)))
    omega = [max(root[i][j] * far_v[i][j] for j in N) + pi[i] * (v * rho + e_v[i]) for i in N]
    apart = (
        max(
            _length([bar[i] ** 2 * W[i][j] * (far_v[i][j] + v * rho + e_v[i]) for i in N])
            for j in N
        )
        + max(bar[i] ** 2 * sigma[i] * pi[i] for i in N) * whole
        + max(bar[i] * omega[i] * q[i] for i in N)
        + max(sigma[i] * bar[i] * row[i] for i in N) * T
    )
    c1 = min(
        apart,
        max(bar[i] * (omega[i] + sigma[i] * row[i]) for i in N) * T,
        max(tau[i] * (max(far_v[i]) + v * rho + e_v[i]) for i in N) * k_b,
    )
    mass = mp.sqrt(max(sum(W[i][j] for i in N) for j in N)) * max(bar[i] * pi[i] for i in N)
    direct = (
        max(_length([bar[i] * W[i][j] for i in N]) for j in N)
        + max(bar[i] * row[i] for i in N) * whole
    )
    c2 = v * min(direct, max(pi) * k_b, mass)
    return query + values + c1 + c2 + max(sigma[i] * pi[i] for i in N) * a
