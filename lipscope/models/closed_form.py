"""Attention modules that are plain self-attention, recognised by probing, in closed form.

The module is fed zero and the unit vectors, which reveals weights and biases wherever and however
it stores them (fused, transposed, split by head). The closed form is used only if it reproduces
the module's own q, k and v at the actual input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.attention.layer import FactoredAttention, SelfAttention
from lipscope.attention.scores import Dot, Rope
from lipscope.models.attention import AttentionCall
from lipscope.models.capture import RecordedCall
from lipscope.models.maps import ModelRunner, attention_call, run_to

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative error of q, k, v and the output; dtypes not listed are too coarse to decide."""

LARGE = 1 << 30
"""Bytes of a mask beyond which a layer is differentiated by autograd, from the rule of its mask."""


class LargeMaskError(Exception):
    """The closed form would need a mask of more than LARGE bytes, at this length."""


@dataclass(frozen=True, eq=False)
class Projections:
    """Token by token q = Q x + bq, k = K x + bk, v = V x + bv, before any rotation.

    layout: which entries of a head rotate together, as a reading of the rotary tables; None
            without rotation
    order:  permutes a head into two halves that rotate together, which leaves all scores unchanged
    """

    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor]
    layout: str | None
    order: Tensor


def closed_form(
    runner: ModelRunner, core: nn.Module, call: RecordedCall, known: Projections | None = None
) -> tuple[SelfAttention, Projections | None] | None:
    """The attention module as a SelfAttention without O; None if its own q, k, v disagree.

    `known` are its projections, if they have been found before. A module with a method
    `closed_heads(n)` states its map itself, as L2 attention must: scores that are distances are not
    products of linear maps. The stated map must reproduce the module's values.

    Raises:
        LargeMaskError: If the rule of the mask would have to be written down for too many tokens.
    """
    if runner.dtype not in TOLERANCE:
        return None
    X = call.hidden
    with torch.no_grad():
        own = attention_call(runner, core, call)
        closed_heads: Any = getattr(core, "closed_heads", None)
        if closed_heads is not None:
            try:
                f = closed_heads(X.shape[-2]).to(X.device, X.dtype)
            except UserError:  # it has none after all, for this length or these settings
                return None
            return (f, None) if same(f.heads_apart()(X), own.output()) else None
        # SelfAttention has one mask for all heads.
        shared = own.mask is None or own.mask.ndim == 2 or own.mask.shape[1] == 1
        if own.q.shape[-2] != own.k.shape[-2] or not shared:
            return None
        # SelfAttention has no words for windows on both sides and chunks.
        if (own.ahead or own.chunk is not None) and own.q.shape[-2] ** 2 > LARGE:
            raise LargeMaskError
        try:
            probe = (call.single or call).at(_probe(X))
            probed = attention_call(runner, core, probe) if known is None else None
        except RuntimeError:  # another argument belongs to this sample, and the map is not plain
            return None
        # Rotary conventions (halves or pairs, full or half tables) do not differ in shape:
        # try each reading and keep the first whose projections reproduce q, k and v.
        for layout, order, rope in _rotations(call, own):
            if probed is not None:
                found = _solve(probed, X.shape[-1], layout, order, rope)
            elif known is not None and known.layout == layout:
                found = known
            else:
                continue
            f = _assemble(found, own, rope)
            q, k, v = f.project(X)
            if (
                same(q, own.q[..., found.order])
                and same(k, own.k[..., found.order])
                and same(v, own.v)
            ):
                return f, found
    return None


def projection_matrix(
    runner: ModelRunner, projection: nn.Module, width: int
) -> tuple[Tensor, Tensor]:
    """O [d', width] and b of an output projection z -> O z + b."""
    device = next(projection.parameters()).device
    # z = 0 gives b, and the unit vectors give the columns of O, whatever class the module is.
    tokens = torch.eye(width + 1, width, dtype=runner.dtype, device=device).roll(1, dims=0)[None]
    with torch.no_grad():
        y = run_to(runner, projection, RecordedCall((tokens,), {}))[0]
    return (y[1:] - y[0]).T.contiguous(), y[0]


def select_heads(f: SelfAttention, heads: tuple[int, ...]) -> SelfAttention:
    """Some heads of f, concatenated."""
    if heads == tuple(range(f.heads)):
        return f
    alone = [f.head(h) for h in heads]
    Q, K, V = (torch.cat([getattr(g, name) for g in alone]) for name in "QKV")
    bq, bk, bv = zip(*(g.biases or (None, None, None) for g in alone), strict=True)
    sinks = None if f.kernel.sinks is None else f.kernel.sinks[list(heads)]
    factors: dict[str, Any] = {"M": f.M[list(heads)]} if isinstance(f, FactoredAttention) else {}
    return replace(
        f,
        **factors,
        Q=Q,
        K=K,
        V=V,
        O=None,
        heads=len(heads),
        kv_heads=None,
        biases=None if f.biases is None else (torch.cat(bq), torch.cat(bk), torch.cat(bv)),
        kernel=replace(f.kernel, sinks=sinks),
    )


def _probe(X: Tensor) -> Tensor:
    """Zero and the d unit vectors as tokens, [rows, n, d], padded with zeros."""
    # Rows of n tokens, as in the recorded call: its rotary tables and mask fit no other length.
    n, d = X.shape[-2:]
    rows = -(-(d + 1) // n)
    tokens = X.new_zeros(rows * n, d)
    tokens[1 : d + 1] = torch.eye(d, dtype=X.dtype, device=X.device)
    return tokens.view(rows, n, d)


def _rotations(
    call: RecordedCall, own: AttentionCall
) -> Iterator[tuple[str | None, Tensor, Rope | None]]:
    """Layout, order and tables: no rotation first, then every reading of a pair of tables."""
    n, size = own.q.shape[-2:]
    plain = torch.arange(size, device=own.q.device)
    yield None, plain, None
    for pair in (*call.args, *call.kwargs.values()):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            continue
        if not all(
            isinstance(t, Tensor)
            and t.ndim in (2, 3)
            and t.shape[-2] == n
            and t.is_floating_point()
            for t in pair
        ):
            continue
        tables = torch.stack([t.reshape(-1, n, t.shape[-1])[0] for t in pair])
        width = tables.shape[-1]
        readings = {
            "halves": (width, tables[..., : width // 2]),
            "pairs": (width, tables[..., ::2]),
            "pairs, one table": (width, tables[..., : width // 2]),
            "halves, half a table": (2 * width, tables),
            "pairs, half a table": (2 * width, tables),
        }
        for layout, (turned, (cos, sin)) in readings.items():
            if turned > size or turned % 2 or size % 2:
                continue
            # The first `turned` entries of a head rotate: put it into two rotating halves.
            moving = plain[:turned]
            still = plain[turned:]
            first, second = (moving[::2], moving[1::2]) if "pairs" in layout else moving.chunk(2)
            order = torch.cat([first, still[::2], second, still[1::2]])
            # Tables for whole heads: the other entries get angle 0.
            rest = cos.new_zeros(n, size // 2 - cos.shape[1])
            cos = torch.cat([cos, rest + 1] * 2, dim=-1)
            sin = torch.cat([sin, rest] * 2, dim=-1)
            yield layout, order, Rope(cos, sin)


def _solve(
    probed: AttentionCall, d: int, layout: str | None, order: Tensor, rope: Rope | None
) -> Projections:
    """Weights and biases from the module's response to the probe, with the rotation undone."""
    q = probed.q
    k = probed.k
    if rope is not None:
        # A table stretched by s (YaRN) turns and stretches: its inverse is its adjoint over s^2.
        stretch = rope.cos.square() + rope.sin.square()
        q, k = (rope.turn_back(x[..., order]) / stretch for x in (q, k))
    weights = []
    biases = []
    for y in (q, k, probed.v):
        rows = y.transpose(1, 2).reshape(-1, y.shape[1] * y.shape[3])
        weights.append((rows[1 : d + 1] - rows[0]).T.contiguous())
        biases.append(rows[0].contiguous())
    return Projections(
        weights=(weights[0], weights[1], weights[2]),
        biases=(biases[0], biases[1], biases[2]),
        layout=layout,
        order=order,
    )


def _assemble(found: Projections, own: AttentionCall, rope: Rope | None) -> SelfAttention:
    own = own.with_mask(own.q.shape[-2])
    mask = own.mask
    if mask is not None:
        n = own.q.shape[-2]
        mask = mask.expand(*mask.shape[:-2], n, n)
        mask = mask if mask.ndim == 2 else mask[0, 0] if mask.shape[0] == 1 else mask[:, 0]
    return SelfAttention(
        *found.weights,
        heads=own.q.shape[1],
        kv_heads=own.k.shape[1],
        biases=None if all((b == 0).all() for b in found.biases) else found.biases,
        causal=own.causal,
        window=own.window,
        mask=mask,
        kernel=Dot(own.scale, own.softcap, own.sinks, rope),
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are equal up to the rounding of their dtype."""
    return bool((a - b).norm() <= TOLERANCE[b.dtype] * b.norm())
