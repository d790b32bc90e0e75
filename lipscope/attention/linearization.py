"""The Jacobian of self-attention at X: project a tangent, push it through the softmax, project out.

    dX -> (dq, dk, dv) = dX [Q; K; V]'  (rotated, augmented)  -> do = jvp(dq, dk, dv)  ->  do O'

Everything that depends only on X is kept: q, k, v, o, the log-sum-exp and, while it fits, P. A head
reads X only through the rows of Q, K, V: where these are fewer than d, tangents live in their span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.attention.float64_check import compare
from lipscope.attention.rounding_scale import (
    BlockNorms,
    Lengths,
    WeightNorms,
    block_norms,
    largest,
    over_heads,
    per_head,
)
from lipscope.attention.scores import L2, Dot, Rope, augment, common_centre
from lipscope.fused import backend, reference, tiled
from lipscope.fused._torch_internals import is_observed
from lipscope.fused.pattern import Pattern
from lipscope.fused.reference import Triple, Weights
from lipscope.linalg.operator import LOCAL, Compression, LinearOperator, Rounding, Space

if TYPE_CHECKING:
    from lipscope.attention.layer import SelfAttention

CACHE = 256 << 20
"""Largest P to keep, in bytes; beyond that it is recomputed, a block of rows at a time."""

ROUGH_SCORES = 64
"""Largest condition for steps in bfloat16: scores are then off by up to a quarter, which is good
enough to find the direction of the top vector."""

UNRESOLVED = 1e-2
"""Resolution beyond which scores are too large for the kernels: their row sums cancel, and the
slower tiles, which subtract the row sum before the product with v, take over."""

PIECE = 1 << 19
"""Bytes of scores in a piece, per thread: a few such arrays stay in a cache of one or two
megabytes, which every core has for itself."""

SHORT = 64
"""Rows of P below which a plain product is faster: nothing leaves the cache there."""


@dataclass(frozen=True, eq=False)
class State:
    """What the products need, for M members of H heads (G of keys).

    All tensors have the leading dimension M, or 1 where they are shared by all members.
    """

    W: Tensor  # [M | 1, H k + G k + G m, r]: rows of Q (scaled), K, V in the tangents' coordinates
    O: Tensor | None
    q: Tensor  # [M, H, n, k'] scaled, rotated, augmented
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    pattern: Pattern
    weights: Weights | None = None
    tiles: bool = False
    rope: Rope | None = None
    distance: tuple[Tensor, Tensor, float] | None = None  # centred q, k and scale of an L2 kernel
    space: Space = LOCAL  # with several, q, o and lse are those of this rank's tokens

    def project(self, E: Tensor) -> Triple:
        """dX [M, n, r] -> dq, dk, dv."""
        H = self.q.shape[1]
        G = self.k.shape[1]
        size = (self.W.shape[1] - G * self.v.shape[-1]) // (H + G)
        # One weight for all members makes one large product instead of M small ones.
        y = E @ (self.W[0].T if self.W.shape[0] == 1 else self.W.mT)
        dq, dk, dv = y.split([H * size, G * size, G * self.v.shape[-1]], dim=-1)
        dq, dk, dv = (
            x.unflatten(-1, (c, -1)).transpose(-3, -2) for x, c in ((dq, H), (dk, G), (dv, G))
        )
        if self.rope is not None:
            dq = self.rope.turn(dq)
            dk = self.rope.turn(dk)
        if self.distance is not None:
            # d(2s q, -s |q|^2, 1) and d(k, 1, -s |k|^2)
            q, k, s = self.distance
            k = self.space.shard(k, -2)
            none_q = torch.zeros_like(dq[..., :1])
            none_k = torch.zeros_like(dk[..., :1])
            dq = torch.cat([2 * s * dq, -2 * s * (q * dq).sum(-1, keepdim=True), none_q], dim=-1)
            dk = torch.cat([dk, none_k, -2 * s * (k * dk).sum(-1, keepdim=True)], dim=-1)
        return dq, dk, dv

    def project_adjoint(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The adjoint of `project`."""
        if self.distance is not None:
            q, k, s = self.distance
            k = self.space.shard(k, -2)
            gq = 2 * s * (gq[..., :-2] - q * gq[..., -2:-1])
            gk = gk[..., :-2] - 2 * s * k * gk[..., -1:]
        if self.rope is not None:
            gq = self.rope.turn_back(gq)
            gk = self.rope.turn_back(gk)
        if gq.stride(-2) == 1:  # column after column, as `kept` leaves them
            G = torch.cat([x.mT.flatten(-3, -2) for x in (gq, gk, gv)], dim=-2).mT
        else:
            G = torch.cat([_side_by_side(x) for x in (gq, gk, gv)], dim=-1)
        return G @ (self.W[0] if self.W.shape[0] == 1 else self.W)

    def mv(self, E: Tensor) -> Tensor:
        do = self.jvp(self.project(E.to(self.W.dtype)))
        joined = _side_by_side(do)
        return joined if self.O is None else joined @ self.O.T

    def rmv(self, U: Tensor) -> Tensor:
        U = U.to(self.W.dtype)
        U = U if self.O is None else U @ self.O
        g = U.unflatten(-1, (self.q.shape[1], -1)).transpose(-3, -2)
        return self.project_adjoint(*self.vjp(g))

    def jvp(self, tangent: Triple) -> Tensor:
        """dq, dk, dv -> do, through the softmax."""
        qkv = (self.q, self.k, self.v)
        if self.weights is not None:
            jvp = _jvp_in_pieces if _fits_pieces(self.weights, tangent[0]) else reference.jvp
            return jvp(self.weights, *qkv, tangent)
        if self.tiles:
            return tiled.jvp(*qkv, self.lse, tangent, self.pattern)
        return backend.jvp(*qkv, self.o, self.lse, tangent, self.pattern)

    def vjp(self, g: Tensor) -> Triple:
        """The adjoint of `jvp`: g [M, H, n, m] -> gq, gk, gv."""
        qkv = (self.q, self.k, self.v)
        if self.weights is not None:
            vjp = _vjp_in_pieces if _fits_pieces(self.weights, g) else reference.vjp
            return vjp(self.weights, *qkv, g)
        if self.tiles:
            return tiled.vjp(*qkv, self.lse, g, self.pattern)
        return backend.vjp(*qkv, self.o, self.lse, g, self.pattern)

    @property
    def keeps_weights(self) -> bool:
        """Whether P is kept, not recomputed by every product."""
        return self.weights is not None

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """P [M, H, rows, n'] in blocks of whole rows; a single block if P has been kept."""
        H = self.q.shape[1]
        if self.weights is not None:
            rows = slice(0, self.q.shape[2])
            cols = slice(0, self.k.shape[2])
            yield rows, cols, reference.heads(self.weights.P, H)
            return
        for rows, cols, tile in tiled._blocks(self.q, self.k, self.pattern):
            q = self.q[..., rows, :]
            k = self.k[..., cols, :]
            P = reference.weights(q, k, self.lse[..., rows], tile).P
            yield rows, cols, reference.heads(P, H)

    def bias_left(self, largest_score: Tensor) -> Tensor:
        """What the additive mask adds to the size of the logits: `Pattern.bias_left_by_head`."""
        return self.pattern.bias_left_by_head(self.q.shape[-2], self.k.shape[-2], largest_score)

    def evaluated(self, condition: Tensor, keep: bool) -> State:
        """The state with the output and the log-sum-exp, and with P if it is to be kept."""
        qkv = (self.q, self.k, self.v)
        if keep:
            o, lse, weights = reference.forward_and_weights(*qkv, self.pattern)
            columns = _fits_pieces(weights, self.q)
            q, k, v = (x.mT.contiguous().mT if columns else x for x in qkv)  # column after column
            return replace(self, q=q, k=k, v=v, o=o, lse=lse, weights=weights)
        resolution = 8 * torch.finfo(self.q.dtype).eps * condition.max()
        lost = self.q.dtype == torch.float32 and not resolution <= UNRESOLVED
        tiles = lost and backend.fused(*qkv, self.pattern)
        o, lse = (tiled if tiles else backend).forward(*qkv, self.pattern)
        return replace(self, o=o, lse=lse, tiles=tiles)

    def take(self, members: Tensor) -> State:
        """The state of some of the members."""
        return self._each(lambda x: x if x.shape[0] == 1 else x[members.to(x.device)])

    def apart(self, heads: int) -> State:
        """The state with (member, head) pairs as members, of one head each."""

        def split(x: Tensor) -> Tensor:
            x = x.repeat_interleave(heads // x.shape[1], dim=1)
            return x.reshape(-1, 1, *x.shape[2:])

        w = self.weights
        p = self.pattern
        if w is not None:
            w = w.each(lambda x: reference.heads(x, heads))
        # Sinks are already part of the log-sum-exp; masks are repeated for each head of a member.
        spread = replace(p, sinks=None).each(lambda x: x.repeat_interleave(heads, dim=0))
        return replace(replace(self, weights=w, pattern=Pattern())._each(split), pattern=spread)

    def low_precision(self) -> State:
        """The state in bfloat16, for steps that only search for the direction.

        Output and log-sum-exp keep their precision: the weights exp(S - lse) depend on the latter.
        """
        low = self._each(lambda x: x.to(torch.bfloat16) if x.dtype.is_floating_point else x)
        return replace(
            low, o=self.o, lse=self.lse, O=None if self.O is None else self.O.to(torch.bfloat16)
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> State:
        """Apply a change to every tensor with a leading dimension of members."""
        d = self.distance
        return replace(
            self,
            W=self.W if self.W.numel() == 0 else change(self.W),
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            o=change(self.o),
            lse=change(self.lse),
            weights=None if self.weights is None else self.weights.each(change),
            pattern=self.pattern.each(change),
            distance=None if d is None else (change(d[0]), change(d[1]), d[2]),
        )


def _side_by_side(x: Tensor) -> Tensor:
    """[M, H, n, k] -> [M, n, H k]; a view if x is stored column after column."""
    if x.stride(-2) == 1:
        return x.mT.flatten(-3, -2).mT
    return x.transpose(-3, -2).flatten(-2)


def _fits_pieces(W: Weights, x: Tensor) -> bool:
    """Whether products may be formed in place: on the CPU, where nobody records or maps them."""
    if x.device.type != "cpu" or x.requires_grad or W.P.shape[-1] < SHORT:
        return False
    return not is_observed(x)


# Products with J and J' on the CPU from a kept P, a piece at a time that fits into the cache. The
# formulas are those of `reference`, but the scores of a piece are written once and changed in place
# while they are in the cache, and every result is formed as its transpose, [k, n] in memory, which
# the library multiplies up to twice as fast as [n, k] in float64.


def _jvp_in_pieces(W: Weights, q: Tensor, k: Tensor, v: Tensor, tangent: Triple) -> Tensor:
    """`reference.jvp`; what is returned is [..., m, n] in memory."""
    groups = k.shape[-3]
    dq, dk, dv = tangent
    q_ = reference.rows(q, groups)
    dq_ = reference.rows(dq, groups)
    do = q_.new_empty(*q_.shape[:-2], v.shape[-1], q_.shape[-2]).mT  # column after column
    for keys, part in _pieces(W.P):
        P = W.P[part]
        # dT = dq k' + q dk'
        S = torch.bmm(dq_[part], k[keys].mT).baddbmm_(q_[part], dk[keys].mT)
        if W.slope is not None:
            S.mul_(W.slope[part])
        # dP = P (S - rowsum(P S)), in place of S
        dP = S.sub_((P * S).sum(-1, keepdim=True)).mul_(P)
        # do' = v' dP' + dv' P'
        torch.bmm(v[keys].mT, dP.mT, out=do[part].mT).baddbmm_(dv[keys].mT, P.mT)
    return reference.heads(do, q.shape[-3])


def _vjp_in_pieces(W: Weights, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Triple:
    """`reference.vjp`; all three are [..., k, n] in memory."""
    groups = k.shape[-3]
    q_ = reference.rows(q, groups)
    g_ = reference.rows(g, groups)
    gq, gk, gv = (
        x.new_empty(*x.shape[:-2], size, x.shape[-2]).mT  # column after column
        for x, size in ((q_, q_.shape[-1]), (k, k.shape[-1]), (k, v.shape[-1]))
    )
    for keys, part in _pieces(W.P):
        P = W.P[part]
        gT = torch.bmm(g_[part], v[keys].mT)
        gT = gT.sub_((P * gT).sum(-1, keepdim=True)).mul_(P)
        if W.slope is not None:
            gT.mul_(W.slope[part])
        # gq' = k' gT',  gk' = q' gT,  gv' = g' P, where rows of other pieces have added theirs
        torch.bmm(k[keys].mT, gT.mT, out=gq[part].mT)
        added = 0 if part[2].start == 0 else 1
        gk[keys].mT.baddbmm_(q_[part].mT, gT, beta=added)
        gv[keys].mT.baddbmm_(g_[part].mT, P, beta=added)
    return reference.heads(gq, q.shape[-3]), gk, gv


Index = tuple[int | slice, int | slice]
Part = tuple[int | slice, int | slice, slice]


def _pieces(P: Tensor) -> Iterator[tuple[Index, Part]]:
    """Which heads, and which of their rows of P [M, G, rows, n'], make a batch of few matrices."""
    members, groups, height, width = P.shape
    row = width * P.element_size()
    piece = PIECE * torch.get_num_threads()
    together = max(1, piece // (height * row))
    tall = max(1, min(height, piece // row))
    # A batch runs along one dimension: over members of a single head, or over the heads of one.
    if groups == 1:
        batches: Iterator[Index] = (
            (slice(i, i + together), 0) for i in range(0, members, together)
        )
    else:
        batches = (
            (m, slice(i, i + together)) for m in range(members) for i in range(0, groups, together)
        )
    for keys in batches:
        for top in range(0, height, tall):
            yield keys, (*keys, slice(top, top + tall))


def linearize(
    f: SelfAttention,
    X: Tensor,
    apart: bool,
    weights: Tensor | None = None,
    kind: type[State] = State,
    space: Space = LOCAL,
) -> LinearOperator:
    """The Jacobian of f at X; with `apart`, of each head separately, as a batch (member-major).

    weights: token weights, [n] or [B, n], if rounding is to be stated for W^(1/2) J W^(-1/2).
    kind:    the State of several ranks, if they share the tokens; X is then this rank's part
    """
    tokens = X if X.ndim == 3 else X[None]
    with torch.no_grad():
        state, growth, blocks = _state(f, tokens, weights, apart, kind, space)
        size = None
        if blocks is not None:
            size = blocks.values + blocks.queries.amax(dim=-1) + blocks.keys
        if apart:
            state = state.apart(f.heads)
            rounding = Rounding(*growth, size).each(torch.flatten)
        else:
            rounding = over_heads(*growth, size, f.weight_norms.o)
        # Rows of Q (scaled), K, V stacked: [1, H k + G k + G m, d], or by head [H, 2k + m, d].
        Q = f.Q * f.scale if isinstance(f.kernel, Dot) else f.Q
        W = torch.cat([Q, f.K, f.V])[None]
        if apart:
            by_head = Q.unflatten(0, (f.heads, -1)), f.per_head(f.K), f.per_head(f.V)
            W = torch.cat(by_head, dim=1)
        basis = None
        if apart or W.shape[-2] < W.shape[-1]:
            # [Q; K; V]' = basis R, so E -> E [Q; K; V]' depends on E basis only: the solver
            # works with [n, rank] instead of [n, d]. QR has no half-precision version.
            half = W.element_size() < 4
            basis, R = (x.to(W.dtype) for x in torch.linalg.qr(W.mT.float() if half else W.mT))
            W = R.mT
        copies = tokens.shape[0] if apart else 1
        state = replace(state, W=W.repeat(copies, 1, 1))
    batch = None if X.ndim == 2 and not apart else state.q.shape[0]
    core = _operator(state, (X.shape[-2], W.shape[-1]), batch, rounding, state.q.dtype)
    if basis is not None:
        basis = basis.repeat(copies, 1, 1)
    if X.dtype != torch.float64:
        compared = compare(f, tokens, apart, basis, space)
        core = replace(core, rounding=replace(core.rounding, compared=compared))
    return core if basis is None else _uncompressed(core, basis, X.shape[-1])


def query_rounding(f: SelfAttention, X: Tensor) -> Rounding:
    """How rounding grows in the derivative of each row of X [B, n, d] in its own query, [B n]."""
    with torch.no_grad():
        _, growth, blocks = _state(f, X, None, apart=False)
    condition, worst = (x[..., None].expand(-1, -1, X.shape[1]) for x in growth)
    size = None if blocks is None else blocks.queries
    return over_heads(condition, worst, size, f.weight_norms.o).each(torch.flatten)


def _state(
    f: SelfAttention,
    X: Tensor,
    token_weights: Tensor | None,
    apart: bool,
    kind: type[State] = State,
    space: Space = LOCAL,
) -> tuple[State, tuple[Tensor, Tensor], BlockNorms | None]:
    """Queries, keys, values and output at X, and how rounding grows (infinite after overflow)."""
    norms = f.weight_norms
    if f.padding is not None:  # the content of padded tokens must not matter
        X = X * space.shard(f.padding, -1)[..., None]
    if f.kernel.sinks is None and f.biases is not None:
        # The value bias shifts all outputs alike, and the Jacobian does not depend on it.
        f = replace(f, biases=(*f.biases[:2], None))
    q, k, v = (x.contiguous() for x in f.project(X))
    k = space.gather(k)
    v = space.gather(v)
    distance = None
    if isinstance(f.kernel, L2):
        centre = common_centre(k)
        distance = (q - centre, k - centre, f.scale)
        q, k = augment(f.kernel, q, k)
    else:
        q = q * f.scale
    if f.kernel.sinks is None:
        # The Jacobian depends on keys and values only through differences: removing their common
        # part makes rounding smaller. Not with sinks, which do not shift along.
        v = v - _centre(v)
        k = k if f.kernel.softcap is not None or distance else k - _centre(k)
    pattern = Pattern(
        causal=f.causal,
        window=f.window,
        softcap=f.kernel.softcap,
        mask=f.mask_per_head,
        queries=f.padding,
        keys=f.padding,
        sinks=f.kernel.sinks,
    )
    rope = f.kernel.rope if isinstance(f.kernel, Dot) else None
    state = kind(
        W=q.new_empty(1, 0, 0),  # filled in by `linearize`, once the basis is known
        O=None if f.O is None or apart else f.O.detach(),
        q=q,
        k=k,
        v=v,
        o=q.new_empty(0),  # o and lse are filled in by `evaluated`
        lse=q.new_empty(0),
        pattern=pattern,
        rope=rope,
        distance=distance,
        space=space,
    )
    summed, condition, worst = _rounding_growth(f, X, norms, state)
    numbers = q.shape[0] * f.heads * -(-k.shape[2] // space.size) * k.shape[2]
    state = state.evaluated(condition, keep=numbers * q.element_size() <= CACHE)
    out = state.o.transpose(-3, -2).flatten(-2).to(v.dtype)
    out = out if state.O is None else out @ state.O.T
    finite = out.isfinite().all(dim=(1, 2)) & v.isfinite().all(dim=(1, 2, 3))
    lost = space.largest((~finite).double()) > 0
    condition = torch.where(lost[:, None].cpu(), torch.inf, condition)
    if q.dtype != torch.float64:  # rounding is measured in float64 at the end instead
        return state, (condition, worst), None
    stretch = 1.0
    if rope is not None:
        stretch = float(space.largest((rope.cos.abs() + rope.sin.abs()).max()))
        # Every key is rotated by a different angle: only lengths remain.
        one = torch.eye(q.shape[-1], dtype=torch.float64).expand_as(norms.q_gram)
        norms = replace(norms, q_gram=one, k_gram=one)
    stretch_q = stretch * (1.0 if distance else abs(f.scale))
    norms = replace(norms, q=stretch_q * norms.q, k=stretch * norms.k)
    w = token_weights if token_weights is None or token_weights.ndim == 2 else token_weights[None]
    return state, (condition, worst), block_norms(state, norms, summed, 1 + worst, w)


def _rounding_growth(
    f: SelfAttention, X: Tensor, norms: WeightNorms, state: State
) -> tuple[Lengths, Tensor, Tensor]:
    """What projections sum up, and how rounding grows in a score: condition and worst, [M, H] each.

    The rounding error of Q x is a multiple of |Q| |x| + |b_q|, whatever cancels in Q x. A score
    sums terms of size |q| |k| (condition); an error of a query is, times |k|, an error of the score
    (worst). For a distance s |q - k|^2 the terms are s (|q| + |k|)^2, and the errors of the
    projections enter times 2 s (|q| + |k|). What an additive mask adds, beyond what a whole row
    shares, counts as a term of the score.
    """
    space = state.space
    x = space.largest(largest(X[:, None]))  # the length of the longest token, [M, 1]
    parts = []
    for W, b, count in zip(
        (norms.q_all, norms.k_all, norms.v_all),
        f.biases or (None,) * 3,
        (f.heads, f.groups, f.groups),
        strict=True,
    ):
        long = W.new_zeros(1) if b is None else largest(b.reshape(1, count, 1, -1))
        parts.append(W * x + (long if b is None else per_head(long, f.heads)))
    if isinstance(f.kernel, Dot):
        parts[0] = abs(f.scale) * parts[0]
    summed = Lengths(*parts)
    q, k, s = state.distance or (state.q, state.k, 1.0)
    long_q, long_k = (per_head(space.largest(largest(x)), f.heads) for x in (q, k))
    if isinstance(f.kernel, L2):
        condition = s * (long_q + long_k).square()
        worst = condition + 2 * s * (long_q + long_k) * (summed.q + summed.k)
    else:
        condition = long_q * long_k
        worst = condition + summed.q * long_k + long_q * summed.k
    softcap = state.pattern.softcap
    largest_score = condition if softcap is None else condition.clamp_max(softcap)
    added = space.largest(state.bias_left(largest_score.to(q.device))).cpu()
    return summed, condition + added, worst + added


def _centre(x: Tensor) -> Tensor:
    """The coordinatewise median of up to 255 tokens."""
    # Any centre is correct; a median is not moved by outliers, unlike a mean.
    return x[..., :: max(1, x.shape[-2] // 255), :].median(dim=-2, keepdim=True).values


def _operator(
    state: State,
    in_shape: tuple[int, int],
    batch: int | None,
    rounding: Rounding,
    dtype: torch.dtype,
) -> LinearOperator:
    out_size = state.q.shape[1] * state.v.shape[-1] if state.O is None else state.O.shape[0]
    out_shape = (in_shape[0], out_size)
    leading = () if batch is None else (batch,)

    def take(members: Tensor) -> LinearOperator:
        own = rounding.each(lambda x: x[members])
        return _operator(state.take(members), in_shape, len(members), own, dtype)

    exact = LinearOperator(
        mv=lambda E: state.mv(E.reshape(-1, *in_shape)).reshape(*leading, *out_shape).to(dtype),
        rmv=lambda U: state.rmv(U.reshape(-1, *out_shape)).reshape(*leading, *in_shape).to(dtype),
        in_shape=in_shape,
        out_shape=out_shape,
        batch=batch,
        dtype=dtype,
        device=state.q.device,
        rounding=rounding if batch is not None else rounding.each(lambda x: x[0]),
        space=state.space,
        take=None if batch is None else take,
    )
    if state.q.dtype != torch.float32 or state.keeps_weights or state.tiles:
        return exact
    kernels = backend.fused(state.q, state.k, state.v, state.pattern)
    if not (kernels and torch.as_tensor(rounding.condition).max() <= ROUGH_SCORES):
        return exact
    low = _operator(state.low_precision(), in_shape, batch, rounding, dtype)
    return replace(exact, low_precision=replace(low, take=None))


def _uncompressed(core: LinearOperator, basis: Tensor, d: int) -> LinearOperator:
    """E -> core(E basis): the operator on whole tokens, with the core for the solver to use."""
    basis = basis if core.batch is not None else basis[0]
    take = core.take

    def restrict(members: Tensor) -> LinearOperator:
        assert take is not None
        return _uncompressed(take(members), basis if basis.shape[0] == 1 else basis[members], d)

    return replace(
        core,
        mv=lambda E: core.mv(E @ basis),
        rmv=lambda U: core.rmv(U) @ basis.mT,
        in_shape=(core.in_shape[0], d),
        take=None if take is None else restrict,
        rounding=replace(core.rounding, compared=None),
        compressed=Compression(core, lambda E: E @ basis.mT),
    )
