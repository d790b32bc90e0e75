"""One solve over several ranks: attention whose tokens are spread over processes, one GPU each.

    J:   dX -> dq, dk, dv of this rank's tokens; dk and dv are gathered; do = jvp(dq, dk, dv)
    J':  g -> gq, and this rank's share of gk and gv, which are summed over ranks and scattered

Keys and values at X are gathered once. A rank computes whole rows of scores, for its own
queries only, so no softmax is ever split; the outputs of a product stay where the next one needs
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.layer import HeadsApart, SelfAttention, check_tokens
from lipscope.attention.linearization import State, linearize
from lipscope.attention.scores import Dot, Rope
from lipscope.fused.arguments import HALF
from lipscope.fused.pattern import Pattern
from lipscope.fused.primitive import Rules, attend_by_rules
from lipscope.fused.reference import Triple, Weights
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.space import TokenShards, chunks_of, from_all

T = TypeVar("T")


def shard(X: Tensor, mesh: Any) -> Tensor:
    """The tokens of X that belong to this rank.

    Args:
        X: All tokens, shape `[n, d]` or `[B, n, d]`, the same on every rank.
        mesh: A one-dimensional `torch.distributed.DeviceMesh`, or a process group.

    Returns:
        This rank's tokens, in increasing order of their positions: the first half of them from
        the first half of X, the others from the second half, so that a causal mask leaves every
        rank the same work.

    Raises:
        UserError: If X has fewer tokens than there are ranks, or `mesh` is not a mesh.

    Example:
        >>> import lipscope as ls
        >>> import torch, torch.distributed as dist
        >>> from lipscope.attention.sharded import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> X = torch.eye(4, dtype=torch.float64)
        >>> f = ls.SelfAttention(X, X, X, causal=True)
        >>> e = ls.local_lipschitz(f, shard(X, dist.group.WORLD), mesh=dist.group.WORLD)
        >>> round(e.value, 3) == round(ls.local_lipschitz(f, X).value, 3)
        True
        >>> dist.destroy_process_group()
    """
    return shards_of(X.shape[-2], mesh).shard(X, -2)


def unshard(x: Tensor, mesh: Any) -> Tensor:
    """All tokens in order, from those of each rank: the inverse of `shard`.

    Args:
        x: This rank's tokens, `[..., tokens, size]`, for example `e.right` of an estimate.
        mesh: The mesh they were sharded with.

    Returns:
        `[..., n, size]`, the same on every rank.

    Raises:
        UserError: If `mesh` is not a mesh.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from lipscope.attention.sharded import shard, unshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> X = torch.eye(4)
        >>> torch.equal(unshard(shard(X, dist.group.WORLD), dist.group.WORLD), X)
        True
        >>> dist.destroy_process_group()
    """
    return _shards_here(x, mesh).gather(x)


def group_of(mesh: Any) -> Any:
    """The process group of a mesh."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "mesh needs running processes; start them with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise UserError(
            f"mesh must be a torch.distributed.DeviceMesh or a process group, "
            f"got {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise UserError(
            f"mesh must have one dimension, over which tokens are spread, got {mesh.ndim}; "
            "pass one of its dimensions, for example mesh['tokens']"
        )
    return mesh.get_group()


def shards_of(n: int, mesh: Any) -> TokenShards:
    """n tokens over the ranks of a mesh."""
    group = group_of(mesh)
    return TokenShards(n, dist.get_world_size(group), dist.get_rank(group), group)


def _shards_here(x: Tensor, mesh: Any) -> TokenShards:
    """The spread of the tokens of which this rank has x [..., tokens, size]."""
    shapes = from_all(tuple(x.shape), group_of(mesh))
    shards = shards_of(sum(shape[-2] for shape in shapes), mesh)
    chunks = [chunks_of(shards.n, shards.size, rank) for rank in range(shards.size)]
    counts = [sum(stop - start for start, stop in pair) for pair in chunks]
    expected = [(*shapes[0][:-2], count, shapes[0][-1]) for count in counts]
    if shapes != expected:
        raise UserError(
            f"X on the ranks has shapes {', '.join(map(str, shapes))}, but {shards.n} tokens are "
            f"spread as {', '.join(map(str, expected))}; "
            "use lipscope.attention.sharded.shard(X, mesh)"
        )
    return shards


def on_all(check: Callable[[], T], mesh: Any) -> T:
    """What `check` returns; an error on one rank is raised on all, so that none waits for it."""
    result = None
    error = None
    try:
        result = check()
    except UserError as caught:
        error = str(caught)
    errors = from_all(error, group_of(mesh))
    for rank, message in enumerate(errors):
        if message is not None:
            raise UserError(message if len(errors) == 1 else f"rank {rank}: {message}")
    return result  # type: ignore[return-value]  # without an error there is a result


def sharded_jacobian(f: SelfAttention | HeadsApart, X: Tensor, mesh: Any) -> LinearOperator:
    """The Jacobian of a layer or its `heads_apart()`, X being this rank's tokens, `shard(X, mesh)`.

    Masks, padding and rotary tables are those of all n tokens. The products of the operator, and
    the vectors of a solve, are those of this rank's tokens.

    Raises:
        UserError: On every rank, if an input of any rank is invalid.
    """
    layer = f.layer if isinstance(f, HeadsApart) else f
    kernel = layer.kernel
    rope = kernel.rope if isinstance(kernel, Dot) else None

    def check(n: int) -> None:
        check_tokens(layer, X, n)
        if rope is not None and len(rope.cos) < n:
            raise UserError(
                f"rope tables have shape {tuple(rope.cos.shape)}, which does not cover {n} tokens; "
                f"use Rope.standard({n}, {rope.cos.shape[1]})"
            )

    shards = spread_of(X, mesh, check)
    if isinstance(kernel, Dot) and rope is not None:  # those of the tokens that are here
        here = Rope(*(shards.shard(x[: shards.n], 0) for x in (rope.cos, rope.sin)))
        layer = replace(layer, kernel=replace(kernel, rope=here))
    return linearize(layer, X, isinstance(f, HeadsApart), kind=ShardedState, space=shards)


def spread_of(X: Tensor, mesh: Any, check: Callable[[int], None]) -> TokenShards:
    """The spread of tokens of which X is this rank's part; `check` gets their number.

    An error on one rank is raised on all.
    """
    on_all(lambda: _check_place(X, mesh), mesh)
    shards = _shards_here(X, mesh)
    on_all(lambda: check(shards.n), mesh)
    _check_spread(X, shards)
    return shards


def _check_place(X: Any, mesh: Any) -> None:
    if not isinstance(X, Tensor) or X.ndim not in (2, 3):
        got = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
        raise UserError(f"X must be tokens of shape [tokens, d] or [B, tokens, d], got {got}")
    if dist.get_backend(group_of(mesh)) == "nccl" and not X.is_cuda:
        raise UserError(
            f"the mesh exchanges tensors of GPUs (nccl) and X is on {X.device}; move X there, or "
            "initialise the process group with gloo"
        )


def _check_spread(X: Tensor, shards: TokenShards) -> None:
    """Refuse the whole input on every rank, which looks like an input R times as long."""
    total = X.double().sum()
    high, low = shards.largest(torch.stack([total, -total]))
    alike = shards.size > 1 and bool(high == -low)
    # Tokens that are all equal are the same on every rank, rightly.
    varied = shards.largest((X[..., :1, :] != X).any().double()) > 0
    if alike and bool(varied):
        raise UserError(
            f"all {shards.size} ranks have the same tokens; give each its own, "
            "lipscope.attention.sharded.shard(X, mesh)"
        )


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive queries of this rank, the keys they can see, and the pattern between the two."""

    rows: slice
    cols: slice
    pattern: Pattern
    weights: Weights | None = None


@dataclass(frozen=True, eq=False)
class ShardedState(State):
    """The state of one rank: its own queries, and the keys and values of all."""

    parts: tuple[Part, ...] = ()

    @property
    def keeps_weights(self) -> bool:
        return any(part.weights is not None for part in self.parts)

    def bias_left(self, largest_score: Tensor) -> Tensor:
        parts = _parts(self.pattern, self._shards)
        return torch.stack([self._state(p).bias_left(largest_score) for p in parts]).amax(dim=0)

    def evaluated(self, condition: Tensor, keep: bool) -> ShardedState:
        parts = _parts(self.pattern, self._shards)
        states = [self._state(part).evaluated(condition, keep) for part in parts]
        return replace(
            self,
            o=torch.cat([s.o for s in states], dim=-2),
            lse=torch.cat([s.lse for s in states], dim=-1),
            tiles=states[0].tiles,
            parts=tuple(
                replace(part, weights=s.weights) for part, s in zip(parts, states, strict=True)
            ),
        )

    def jvp(self, tangent: Triple) -> Tensor:
        dq, dk, dv = tangent
        if self.space.size > 1:
            both = self._shards.gather(torch.cat([dk, dv], dim=-1))
            dk, dv = both.split([dk.shape[-1], dv.shape[-1]], dim=-1)
        pushed = [
            self._state(part).jvp(
                (dq[..., part.rows, :], dk[..., part.cols, :], dv[..., part.cols, :])
            )
            for part in self.parts
        ]
        return pushed[0] if len(pushed) == 1 else torch.cat(pushed, dim=-2)

    def vjp(self, g: Tensor) -> Triple:
        if self.space.size == 1:
            return self._state(self.parts[0]).vjp(g)
        n = self.k.shape[-2]
        widths = [self.k.shape[-1], self.v.shape[-1]]
        onto_queries = []
        onto_keys = self.k.new_zeros(*self.k.shape[:-2], n, sum(widths))
        for part in self.parts:
            gq = torch.zeros((), dtype=g.dtype, device=g.device)
            for piece in _pieces(part, g):
                onto, gk, gv = self._state(piece).vjp(g[..., part.rows, :])
                gq = gq + onto
                onto_keys[..., piece.cols, :] += torch.cat([gk, gv], dim=-1)
            onto_queries.append(gq)
        gk, gv = self._shards.scatter_sum(onto_keys).split(widths, dim=-1)
        return torch.cat(onto_queries, dim=-2), gk, gv

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        for part in self.parts:
            for rows, cols, P in self._state(part).blocks():
                yield _moved(rows, part.rows.start), _moved(cols, part.cols.start), P

    def apart(self, heads: int) -> ShardedState:
        alone = [self._state(part).apart(heads) for part in self.parts]
        parts = tuple(
            replace(part, pattern=s.pattern, weights=s.weights)
            for part, s in zip(self.parts, alone, strict=True)
        )
        whole = State.apart(replace(self, parts=()), heads)
        assert isinstance(whole, ShardedState)
        return replace(whole, parts=parts)

    def _each(self, change: Callable[[Tensor], Tensor]) -> ShardedState:
        whole = super()._each(change)
        assert isinstance(whole, ShardedState)
        parts = tuple(
            replace(
                part,
                pattern=part.pattern.each(change),
                weights=None if part.weights is None else part.weights.each(change),
            )
            for part in self.parts
        )
        return replace(whole, parts=parts)

    @property
    def _shards(self) -> TokenShards:
        assert isinstance(self.space, TokenShards)
        return self.space

    def _state(self, part: Part) -> State:
        """The state of a part; until `evaluated` there are neither outputs nor log-sum-exps."""
        known = self.o.numel() > 0
        return State(
            W=self.W[:0],
            O=None,
            q=self.q[..., part.rows, :],
            k=self.k[..., part.cols, :],
            v=self.v[..., part.cols, :],
            o=self.o[..., part.rows, :] if known else self.o,
            lse=self.lse[..., part.rows] if known else self.lse,
            pattern=part.pattern,
            weights=part.weights,
            tiles=self.tiles,
        )


def _parts(pattern: Pattern, shards: TokenShards) -> tuple[Part, ...]:
    """The queries of this rank in consecutive runs; all of them where position is nothing."""
    n = shards.n
    first = 0
    if not (pattern.causal or pattern.window or pattern.mask is not None):
        queries = None if pattern.queries is None else shards.shard(pattern.queries, -1)
        everything = slice(0, len(shards.positions)), slice(0, n)
        return (Part(*everything, replace(pattern, queries=queries)),)
    (start, middle), (second, stop) = shards.chunks
    runs = [(start, stop)] if middle == second else [(start, middle), (second, stop)]
    parts = []
    for start, stop in runs:
        if start < stop:
            cols = pattern.columns(slice(start, stop), n)
            rows = slice(first, first + stop - start)
            parts.append(Part(rows, cols, pattern.tile(slice(start, stop), cols)))
            first = rows.stop
    return tuple(parts)


def _pieces(part: Part, g: Tensor) -> list[Part]:
    """The part, or in half precision a rectangle and the square on the diagonal.

    torch's own backward, the fastest there is, has causal order for squares only. Outputs and
    log-sum-exps are those of all keys, so the cotangents of pieces add up.
    """
    start = part.cols.stop - (part.rows.stop - part.rows.start)
    p = part.pattern
    more = (p.window, p.softcap, p.mask, p.queries, p.keys, p.sinks)
    if not (g.is_cuda and g.dtype in HALF and p.causal and 0 < start == p.shift):
        return [part]
    if any(x is not None for x in more):  # which torch's backward does not know
        return [part]
    rectangle = slice(0, start)
    square = slice(start, part.cols.stop)
    return [
        replace(part, cols=rectangle, pattern=replace(p, causal=False, shift=0)),
        replace(part, cols=square, pattern=replace(p, shift=0)),
    ]


def _moved(cut: slice, by: int) -> slice:
    return slice(cut.start + by, cut.stop + by)


class _Exchange(torch.autograd.Function):
    """`TokenShards.gather` or its adjoint `scatter_sum`: each is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards, gather: bool) -> Tensor:
        ctx.shards = shards
        ctx.gather = gather
        return shards.gather(x) if gather else shards.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(g, ctx.shards, not ctx.gather), None, None


def attend_on_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: TokenShards,
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`attend` with queries, keys and values of this rank's tokens; a mask is that of all."""
    both = _Exchange.apply(torch.cat([k, v], dim=-1), shards, True)
    k, v = both.split([k.shape[-1], v.shape[-1]], dim=-1)
    outputs = []
    for part in _parts(Pattern(causal=causal, window=window, mask=mask), shards):
        p = part.pattern
        rules = Rules(causal=causal, window=window, softcap=softcap, shift=p.shift)
        keys = k[..., part.cols, :]
        values = v[..., part.cols, :]
        queries = q[..., part.rows, :]
        outputs.append(attend_by_rules(queries, keys, values, p.mask, None, sinks, rules, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)
