"""Blocks whose tokens are spread over ranks: attention is shared, everything else stays local.

A block runs on this rank's tokens, with the rotary tables and positions of these. Its attention
function gathers the keys and values of all ranks, by autograd; what else a block does must act
token by token, which the value at X shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.sharded import attend_on_ranks
from lipscope.linalg.differentiate import jacobian_on
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.space import TokenShards
from lipscope.models.attention import AttentionCall, PlainMask, listening
from lipscope.models.capture import RecordedCall
from lipscope.models.running import run_to

if TYPE_CHECKING:
    from lipscope.models.maps import Rerun

TOKENS = {"position_embeddings": -2, "position_ids": -1, "cache_position": 0}
"""Arguments of blocks with one entry per token, and the dimension of the tokens."""

AGREE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference of the block's values, spread and whole, that rounding explains."""


def linearize_on(f: Rerun, X: Tensor, shards: TokenShards) -> LinearOperator:
    """The Jacobian of a block at this rank's tokens X [B, tokens, d]."""
    name = type(f.module).__name__
    if f.entry is not None or f.then is not None:
        raise UserError(
            f"scopes suffix and model run {name} from its inputs on, which are not spread over "
            "ranks; use block, residual, normed, attention or heads"
        )
    here = _Local(f, _local_call(f.call, name, shards), shards)
    with torch.no_grad():
        whole = f.value(shards.gather(X))
        off = here.value(X) - shards.shard(whole, -2)
    size = shards.norm(off.double().norm()) / whole.double().norm()
    if not size <= AGREE.get(X.dtype, 0.1):
        raise UserError(
            f"{name} does not act token by token outside of its attention, so its tokens cannot "
            "be spread over ranks; measure it in one process"
        )
    J = jacobian_on(here.value, X, shards)
    return replace(J, rounding=replace(J.rounding, condition=here.largest_score(X)))


def _local_call(call: RecordedCall, name: str, shards: TokenShards) -> RecordedCall:
    """The call of a block with the arguments of this rank's tokens."""

    def cut(x: Any, dim: int) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(cut(y, dim) for y in x)
        return shards.shard(x, dim) if isinstance(x, Tensor) else x

    def kept(key: str, x: Any) -> Any:
        if key in TOKENS:
            return cut(x, TOKENS[key])
        # Masks are those of all tokens: the attention function cuts them.
        spread = isinstance(x, Tensor) and shards.n in x.shape and key != "attention_mask"
        if spread and x is not call.hidden and not isinstance(x, PlainMask):
            raise UserError(
                f"{name} takes {key} of shape {tuple(x.shape)}, which is not known to belong to "
                "single tokens, so they cannot be spread over ranks; measure it in one process"
            )
        return x

    args = tuple(kept("an argument", x) if i else x for i, x in enumerate(call.args))
    kwargs = {key: kept(key, x) for key, x in call.kwargs.items()}
    return RecordedCall(args, kwargs)


@dataclass(frozen=True, eq=False)
class _Local:
    """x [B, tokens, d] of this rank -> the block's value there."""

    block: Rerun
    call: RecordedCall
    shards: TokenShards

    def value(self, x: Tensor) -> Tensor:
        return self._run(x, self._output)

    def largest_score(self, x: Tensor) -> Tensor:
        """A bound on the largest score inside, per member, over all ranks."""
        largest = torch.zeros(x.shape[0], dtype=torch.float64)

        def note(call: AttentionCall) -> Tensor:
            mask = call.mask
            if mask is not None and mask.shape[-2] > 1:
                mask = self.shards.shard(mask, -2)
            k = self.shards.gather(call.k)
            # By the mask alone: more is visible, and the bound no smaller.
            rows = replace(call, k=k, mask=mask, causal=False, window=None)
            torch.maximum(largest, rows.largest_score().amax(dim=-1).cpu(), out=largest)
            return self._output(call)

        with torch.no_grad():
            self._run(x, note)
        return self.shards.largest(largest)

    def _run(self, x: Tensor, listener: Callable[[AttentionCall], Tensor]) -> Tensor:
        with listening(listener):
            return run_to(self.block.runner, self.block.module, self.call.at(x), self.block.tap)

    def _output(self, call: AttentionCall) -> Tensor:
        n = self.shards.n
        call = call.with_mask(n)
        if call.mask is not None and not {*call.mask.shape[-2:]} <= {1, n}:
            raise UserError(
                f"{type(call.module).__name__} makes a mask or bias of its own from the tokens it "
                "is given, so they cannot be spread over ranks; measure it in one process"
            )
        return attend_on_ranks(
            call.q,
            call.k,
            call.v,
            self.shards,
            scale=call.scale,
            causal=call.causal,
            window=call.window,
            mask=call.mask,
            softcap=call.softcap,
            sinks=call.sinks,
        )
