"""Run a model or its modules, in true float64 if asked for; parts of a model as maps of tokens.

A block whose tokens are spread over ranks runs on this rank's tokens, with the rotary tables and
positions of these. Its attention function gathers the keys and values of all ranks, by autograd;
what else a block does must act token by token, which the value at X shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lipscope._files import on_one_line
from lipscope._types import UserError
from lipscope.attention.linearization import ROUGH_SCORES
from lipscope.attention.sharded import attend_on_ranks, spread_of
from lipscope.fused.primitive import graph_of_any_digits
from lipscope.linalg.differentiate import check_input, jacobian, jacobian_on
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.space import TokenShards
from lipscope.models.attention import (
    NAME,
    AttentionCall,
    PlainMask,
    listening,
    using_attention,
)
from lipscope.models.capture import Captured, RecordedCall, Tap, capture, first_tensor

REDUCED = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
PRODUCTS = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.mm,
    Tensor.mm,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
    torch.einsum,
    torch.nn.functional.linear,
)


LONG = 8192
"""Tokens from which the singular vectors are searched for in bfloat16 on a GPU."""

STEPS = (1e-5, 1e-7, 1e-3)
GROSS = 0.05
"""Relative finite-difference steps, of which the best counts, and the error beyond rounding."""


TOKENS = {"position_embeddings": -2, "position_ids": -1, "cache_position": 0}
"""Arguments of blocks with one entry per token, and the dimension of the tokens."""

AGREE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference of the block's values, spread and whole, that rounding explains."""


class Float64(TorchFunctionMode):
    """While this mode is active, float64 tensors stay float64.

    RMSNorm, softmax and rotary tables explicitly cast to float32, so `model.double()` alone leaves
    seven digits. Integers still become float32 where the model says so (T5 sorts its distances into
    buckets in that dtype); products of mixed dtypes are promoted.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func in CASTS:
                return args[0]
            args = [
                torch.float64 if isinstance(a, torch.dtype) and a in REDUCED else a for a in args
            ]
            if kwargs.get("dtype") in REDUCED:
                kwargs = {**kwargs, "dtype": torch.float64}
        if func in PRODUCTS and any(
            isinstance(a, Tensor) and a.dtype == torch.float64 for a in args
        ):
            args = [a.double() if isinstance(a, Tensor) and a.dtype in REDUCED else a for a in args]
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ModelRunner:
    """The model whose modules are run; a borrowed one lends its weights, cast and detached."""

    trunk: PreTrainedModel
    dtype: torch.dtype
    owned: bool
    implementation: str = NAME

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set attention, mode and arithmetic for a measurement."""
        arithmetic = Float64() if self.dtype == torch.float64 else nullcontext()
        with using_attention(self.trunk, self.implementation), arithmetic:
            yield

    def run(self, module: nn.Module, call: RecordedCall) -> Any:
        """The module's own output for this call."""
        if self.owned:
            return module(*call.args, **call.kwargs)
        # A borrowed model keeps its own tensors: cast copies are substituted for this call only.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        lent = {
            name: t.detach().to(self.dtype) if t.is_floating_point() else t.detach()
            for name, t in tensors
        }
        return functional_call(module, lent, call.args, call.kwargs)


class _Found(Exception):  # noqa: N818 (it ends a forward pass early and is not an error)
    """Carries the requested value out of a forward pass whose rest is not needed."""


def _stop(value: Any) -> NoReturn:
    raise _Found(value)


def run_to(
    runner: ModelRunner,
    module: nn.Module,
    call: RecordedCall,
    tap: Tap | None = None,
    entry: tuple[nn.Module, Tensor] | None = None,
    entry_call: int = 0,
) -> Tensor:
    """The value at `tap` (by default the output) of `module`, called like this.

    With `entry` = (module, x), x replaces the tokens at one call of that module: a shared block
    (ALBERT) runs once per layer.
    """
    calls = count()

    def enter(found: Captured) -> RecordedCall | None:
        assert entry is not None
        return found.value.at(entry[1]) if next(calls) == entry_call else None

    def stop(found: Captured) -> NoReturn:
        _stop(found.value.hidden if found.side == "input" else first_tensor(found.value))

    with (
        runner.ready(),
        nullcontext() if tap is None else capture(dict([tap]), stop),
        nullcontext() if entry is None else capture({entry[0]: "input"}, enter),
    ):
        try:
            return first_tensor(runner.run(module, call))
        except _Found as found:
            return found.args[0]


def attention_call(runner: ModelRunner, module: nn.Module, call: RecordedCall) -> AttentionCall:
    """The arguments that `module`, called like this, passes to the attention function."""
    with runner.ready(), listening(_stop):
        try:
            runner.run(module, call)
        except _Found as found:
            return found.args[0]
    raise AssertionError(f"{type(module).__name__} made no attention call")


@runtime_checkable
class BatchedMap(Protocol):
    """A map of a batch [B, n, d] whose members do not interact."""

    def value(self, x: Tensor) -> Tensor: ...

    def largest_score(self, x: Tensor) -> Tensor:
        """A bound on the largest attention score inside, per member; scores amplify rounding."""
        ...

    def of_members(self, members: Tensor) -> BatchedMap:
        """The map restricted to some members of the batch."""
        ...


def linearize(f: BatchedMap, X: Tensor) -> LinearOperator:
    """The Jacobian at X [n, d] or [B, n, d]; a batch can be restricted to some of its members."""
    if X.ndim == 2:
        J = _differentiated(lambda x: f.value(x[None])[0], lambda x: f.largest_score(x[None])[0], X)
        _check_derivative(lambda x: f.value(x[None])[0], J, X)
        return J
    J = _linearize(f, X)
    _check_derivative(f.value, J, X)
    return J


def _linearize(f: BatchedMap, X: Tensor) -> LinearOperator:
    J = _differentiated(f.value, f.largest_score, X)
    # The solver drops members that have converged: `take` linearizes the rest again, without them.
    return replace(J, take=lambda m: _linearize(f.of_members(m), X[m]))


def _differentiated(
    value: Callable[[Tensor], Tensor], largest_score: Callable[[Tensor], Tensor], X: Tensor
) -> LinearOperator:
    with graph_of_any_digits() as digits:
        J = jacobian(value, X)
    scores = largest_score(X)
    J = replace(J, rounding=replace(J.rounding, condition=scores))
    if not (digits.used and _takes_long(X) and scores.max() <= ROUGH_SCORES):
        return J
    low = replace(J, mv=digits.in_low_precision(J.mv), rmv=digits.in_low_precision(J.rmv))
    return replace(J, mv=digits.exact(J.mv), rmv=digits.exact(J.rmv), low_precision=low)


def _takes_long(X: Tensor) -> bool:
    """Whether attention takes most of the time, and bfloat16 less of it."""
    return X.is_cuda and X.dtype == torch.float32 and X.shape[-2] >= LONG


def _check_derivative(f: Callable[[Tensor], Tensor], J: LinearOperator, X: Tensor) -> None:
    """Compare J with finite differences.

    A module may hide part of its map from autograd (no_grad, straight-through estimators), and its
    Jacobian would then be wrong without any sign of it.
    """
    if X.dtype != torch.float64:
        return  # finite differences of float32 values are too noisy to accuse a module
    E = torch.randn(X.shape, generator=torch.Generator().manual_seed(0), dtype=X.dtype).to(X.device)
    expected = J.mv(E)
    for step in STEPS:
        h = step * X.square().mean().sqrt()
        with torch.no_grad():
            error = (f(X + h * E) - f(X - h * E)) / (2 * h) - expected
        # One good step is enough: stiff maps need a small one, badly scaled maps a large one.
        if error.norm() <= GROSS * expected.norm() or not error.isfinite().all():
            return
    raise UserError(
        "part of this map is hidden from autograd, or its weights are extreme: its derivative "
        "disagrees with finite differences of its values; remove no_grad, detach and "
        "straight-through estimators from it"
    )


@dataclass(frozen=True, eq=False)
class Rerun:
    """x -> the value at `tap` (by default the output) of `module`, called as before on tokens x.

    entry:      if given, x replaces the tokens at a call of this module instead
    entry_call: which call, counted from 0; a module that serves several layers has several
    then:       a module applied to the result
    """

    runner: ModelRunner
    module: nn.Module
    call: RecordedCall
    tap: Tap | None = None
    entry: nn.Module | None = None
    entry_call: int = 0
    then: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.value(x[None])[0] if x.ndim == 2 else self.value(x)

    def value(self, x: Tensor) -> Tensor:
        if self.entry is not None:
            entry = (self.entry, x)
            return run_to(self.runner, self.module, self.call, self.tap, entry, self.entry_call)
        y = run_to(self.runner, self.module, self.call.at(x), self.tap)
        # Inside a block, samples may be flattened into one long sequence (OPT).
        y = y.unflatten(0, (x.shape[0], -1)) if y.ndim == 2 else y
        return y if self.then is None else run_to(self.runner, self.then, RecordedCall((y,), {}))

    def largest_score(self, x: Tensor) -> Tensor:
        largest = torch.zeros(x.shape[0], dtype=torch.float64)

        def note(call: AttentionCall) -> Tensor:
            scores = call.largest_score().amax(dim=-1).cpu()
            # Inside, samples may be cut into windows (Swin): the largest of all bounds each.
            scores = scores if len(scores) == len(largest) else scores.amax().expand_as(largest)
            torch.maximum(largest, scores, out=largest)
            return call.output()

        with torch.no_grad(), listening(note):
            self.value(x)
        return largest

    def of_members(self, members: Tensor) -> Rerun:
        return replace(self, call=self.call.of_members(members))

    def jacobian(self, X: Tensor) -> LinearOperator:
        return linearize(self, X)

    def jacobian_on(self, X: Tensor, mesh: Any) -> LinearOperator:
        """The Jacobian at this rank's tokens, where the ranks of a mesh share them."""
        return linearize_on(self, X, spread_of(X, mesh, lambda n: check_input(X)))


@dataclass(frozen=True, eq=False)
class Heads:
    """X [B, n, d] -> [B, heads, n, m], each head alone.

    The Jacobian is a batch over samples, then heads.
    """

    runner: ModelRunner
    module: nn.Module
    call: RecordedCall
    heads: tuple[int, ...]

    def __call__(self, X: Tensor) -> Tensor:
        if X.ndim == 2:
            return self(X[None])[0]
        return attention_call(self.runner, self.module, self.call.at(X)).output()[
            :, list(self.heads)
        ]

    def jacobian(self, X: Tensor) -> LinearOperator:
        X = X if X.ndim == 3 else X[None]
        # One copy of the sample per head, so that each head has its own independent Jacobian.
        samples = torch.arange(X.shape[0], device=X.device).repeat_interleave(len(self.heads))
        heads = torch.tensor(self.heads, device=X.device).repeat(X.shape[0])
        call = self.call.of_members(samples)
        f = _EachHead(runner=self.runner, module=self.module, call=call, heads=heads)
        try:
            return linearize(f, X[samples])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"{type(self.module).__name__} does not run on copies of one sample, one per head "
                f"({on_one_line(error)}); give two samples or more, or use another scope"
            ) from error


@dataclass(frozen=True, eq=False)
class _EachHead:
    """x [R, n, d] -> [R, n, m]: member r passes through head heads[r] only."""

    runner: ModelRunner
    module: nn.Module
    call: RecordedCall
    heads: Tensor

    def value(self, x: Tensor) -> Tensor:
        return self._alone(x).output()

    def largest_score(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self._alone(x).largest_score().cpu()

    def of_members(self, members: Tensor) -> _EachHead:
        heads = self.heads[members.to(self.heads.device)]
        return replace(self, call=self.call.of_members(members), heads=heads)

    def _alone(self, x: Tensor) -> AttentionCall:
        return attention_call(self.runner, self.module, self.call.at(x)).alone(self.heads)


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
