"""What the terms of attention's Jacobian add up to if none of them cancel: the scale of rounding.

A weight P_ij that is off by a factor 1 + eta makes every block of every head off by eta, whatever
the blocks add up to. The size of a head is therefore the sum of its three block norms, bounded by

    values   ||V|| sqrt(max_j sum_i P_ij)
    queries  max_i sd_i(Q'k) sd_i(v)
    keys     sqrt(max_j sum_i P_ij |K'q_i|^2 sd_i(v)^2)

with sd_i(v)^2 = E_i |v|^2 - |E_i v|^2 under row i of P: an error of scores moves mass within a row,
and never changes its sum. Projections, means and products are off by eps times what *they* sum up,
however large the scores: that part, divided by the growth of the scores, is added to q, k and sd.
Heads under an output matrix add up as sum_h ||O_h|| size_h. See docs/theory/solver.md, rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lipscope.linalg.operator import LOCAL, Rounding, of_order_one

if TYPE_CHECKING:
    from lipscope.attention.layer import SelfAttention
    from lipscope.attention.linearization import State

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class WeightNorms:
    """Norms of the weights per head, in float64.

    q, k, v, o:          upper bounds of the spectral norms of Q_h, K_h, V_h, O_h
    q_all, k_all, v_all: Frobenius norms
    q_gram, k_gram:      Q_h Q_h' / q^2 and K_h K_h' / k^2 [H, k, k], which give |Q_h'y| for any y
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None
    q_all: Tensor
    k_all: Tensor
    v_all: Tensor
    q_gram: Tensor
    k_gram: Tensor


def weight_norms(f: SelfAttention) -> WeightNorms:
    """The norms of the layer's weights, head by head [H]; grouped keys and values are repeated."""
    Q = f.Q.detach().unflatten(0, (f.heads, -1))
    K = f.per_head(f.K.detach())
    V = f.per_head(f.V.detach())
    O = None if f.O is None else f.O.detach().unflatten(1, (f.heads, -1)).transpose(0, 1)
    return WeightNorms(
        q=norm_above(Q),
        k=norm_above(K),
        v=norm_above(V),
        o=None if O is None else norm_above(O),
        q_all=frobenius(Q),
        k_all=frobenius(K),
        v_all=frobenius(V),
        q_gram=_gram(Q),
        k_gram=_gram(K),
    )


def _gram(W: Tensor) -> Tensor:
    size = norm_above(W)[:, None, None].clamp_min(TINY).to(W.device)
    return ((W.double() / size) @ (W.double() / size).mT).cpu()


def norm_above(W: Tensor) -> Tensor:
    """(sum of sigma^8)^(1/8) of each matrix: cheap, at most rank^(1/8) times the spectral norm."""
    W, largest = of_order_one(W.double(), (-2, -1))
    G = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
    return ((G @ G).norm(dim=(-2, -1)).pow(0.25) * largest[..., 0, 0]).cpu()


def frobenius(W: Tensor) -> Tensor:
    W, largest = of_order_one(W.double(), (-2, -1))
    return (W.norm(dim=(-2, -1)) * largest[..., 0, 0]).cpu()


class Lengths(NamedTuple):
    """Lengths of queries, keys and values, per member and head [M, H], in float64."""

    q: Tensor
    k: Tensor
    v: Tensor


class BlockNorms(NamedTuple):
    """Norms of the three blocks of each head: values and keys [M, H], queries [M, H, n].

    Where several ranks share the queries, only the largest of their rows is kept, [M, H, 1].
    """

    values: Tensor
    queries: Tensor
    keys: Tensor


def over_heads(condition: Tensor, worst: Tensor, size: Tensor | None, o: Tensor | None) -> Rounding:
    """The rounding of all heads [M, H, ...], concatenated or under O_h of norms o [H]."""
    largest = condition.amax(dim=1)
    if size is None:
        return Rounding(largest, worst.amax(dim=1))
    total, error = (_sum_over_heads(x, o) for x in (size, (1 + worst) * size))
    return Rounding(largest, torch.where(total > 0, error / total - 1, 0.0), total)


def _sum_over_heads(x: Tensor, o: Tensor | None) -> Tensor:
    if o is None:
        return torch.linalg.vector_norm(x, dim=1)
    total = torch.tensordot(x, o, dims=([1], [0]))
    there = torch.tensordot((x > 0).double(), (o > 0).double(), dims=([1], [0])) > 0
    # Exactly 0 means that there is nothing to round; an underflow must not look like that.
    return torch.where(there, total.clamp_min(TINY), 0.0)


def block_norms(
    s: State, norms: WeightNorms, summed: Lengths, growth: Tensor, weights: Tensor | None = None
) -> BlockNorms:
    """The block norms of each head at the input of `s`.

    summed:         what the projections sum up, |Q_h| |x| + |b_q| and so on
    growth [M, H]:  the error of a weight P_ij, in units of eps
    weights [M, n]: token weights, if the Jacobian is that of a measure, W^(1/2) J W^(-1/2)
    """
    q, k, scale = (s.q, s.k, 0.5) if s.distance is None else s.distance
    H, space = q.shape[1], s.space  # ranks share the queries; each has all keys and values
    # The longest vectors, and their errors divided by the growth of the weights P_ij.
    top = Lengths(*(per_head(space.largest(largest(x)), H) for x in (q, k, s.v)))
    total = (x + y for x, y in zip(top, summed, strict=True))
    off = Lengths(*((x / growth).nan_to_num(nan=torch.inf, posinf=torch.inf) for x in total))
    gain = 2 * scale
    # From here on q, k, v have longest vectors of length one, so that squares stay in range; `top`
    # multiplies the lengths back in.
    q, k, v = (
        per_head(x, H) / t[..., None, None].to(x).clamp_min(torch.finfo(x.dtype).tiny)
        for x, t in ((q, top.q), (k, top.k), (s.v, top.v))
    )
    q_long = _lengths_squared(q, norms.k_gram)
    k_long = _lengths_squared(k, norms.k_gram)
    q_row = q_long.sqrt() * top.q[..., None] + off.q[..., None]
    # Keys enter a distance s |q_i - k_j|^2 through 2 s (q_i - k_j), a product through q_i.
    k_column = k_long.sqrt() * top.k[..., None] + off.k[..., None]
    squares = [_lengths_squared(v, None), _lengths_squared(k, norms.q_gram)]
    moments = torch.cat([v, k, *(x[..., None].to(v) for x in squares)], dim=-1)
    queries = torch.zeros_like(q_row)
    columns = torch.zeros(*q_row.shape[:2], 3, k.shape[2], dtype=torch.float64)
    v_top = top.v + off.v
    row_top = (space.largest(q_row.amax(dim=-1)) * v_top).clamp_min(TINY)
    w = None if weights is None else weights.detach().double().cpu()
    for rows, cols, P in s.blocks():
        # First and second moments of values and keys under each row of P, in one product.
        means = P @ moments[..., cols, :].to(P)
        v_mean, k_mean, v_square, k_square = means.split([v.shape[-1], k.shape[-1], 1, 1], dim=-1)
        v_row = _deviation(v_square, _lengths_squared(v_mean, None)) * top.v[..., None]
        v_row = v_row + off.v[..., None]
        k_row = _deviation(k_square, _lengths_squared(k_mean, norms.q_gram)) * top.k[..., None]
        k_row = k_row + off.k[..., None]
        queries[..., rows] = gain * k_row * v_row
        shares = [
            torch.ones_like(v_row),
            q_row[..., rows] * v_row / row_top[..., None],
            v_row / v_top[..., None],
        ]
        # Column sums of P with three different weights on the rows, again in one product.
        into = torch.stack(shares, dim=-2).square()
        into = into if w is None else into * w[:, None, None, rows]
        columns[..., cols] += (into.to(P) @ P).double().cpu()
    columns = space.sum(columns)
    columns = columns if w is None else columns / w[:, None, None, :]
    of_values, of_keys, of_distances = columns.unbind(dim=-2)
    keys = gain * row_top * of_keys.amax(dim=-1).sqrt()
    if s.distance is not None:
        keys = keys + gain * v_top * (of_distances.sqrt() * k_column).amax(dim=-1)
    # Exactly zero: a row that sees no key (its log-sum-exp is infinite), and values of 0.
    seen = s.lse.cpu() < torch.inf
    any_seen = space.largest(seen.any(dim=-1).double()) > 0
    moved = (summed.v > 0) & any_seen
    values = (norms.v * of_values.amax(dim=-1).sqrt()).clamp_min(TINY)
    queries = torch.where(moved[..., None] & seen, norms.q[:, None] * queries, 0.0)
    if space is not LOCAL:
        queries = space.largest(queries.amax(dim=-1, keepdim=True))
    return BlockNorms(
        values=torch.where((norms.v > 0) & any_seen, values, 0.0),
        queries=queries,
        keys=torch.where(moved, norms.k * keys, 0.0),
    )


def _lengths_squared(x: Tensor, gram: Tensor | None) -> Tensor:
    """x' G x of vectors x [M, H, n, k] with G = gram [H, k, k] or the identity, [M, H, n]."""
    x = x.double()
    return (x * (x if gram is None else x @ gram.to(x))).sum(dim=-1).clamp_min(0).cpu()


def _deviation(square: Tensor, mean: Tensor) -> Tensor:
    """sqrt(E|x|^2 - |E x|^2) [M, H, rows], at least what rounding leaves of the difference."""
    eps = torch.finfo(square.dtype).eps
    square = square[..., 0].double().cpu()
    return (square - mean).clamp_min(8 * eps * square).sqrt()


def per_head(x: Tensor, heads: int) -> Tensor:
    """[M, G, ...] or [M, H, ...] as [M, H, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def largest(x: Tensor) -> Tensor:
    """Length of the longest vector per member and head, [M, H, n, k] -> float64 [M, H], not 0."""
    x, top = of_order_one(x if x.element_size() >= 4 else x.float(), (-2, -1))
    return (x.norm(dim=-1).amax(dim=-1).double() * top[..., 0, 0].double()).cpu()
