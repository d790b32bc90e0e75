"""Parts of a model as maps of their tokens, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lipscope._files import on_one_line
from lipscope._types import UserError
from lipscope.attention.linearization import ROUGH_SCORES
from lipscope.attention.sharded import spread_of
from lipscope.fused.primitive import graph_of_any_digits
from lipscope.linalg.differentiate import check_input, jacobian
from lipscope.linalg.operator import LinearOperator
from lipscope.models.attention import AttentionCall, listening
from lipscope.models.capture import RecordedCall, Tap
from lipscope.models.running import ModelRunner, attention_call, run_to
from lipscope.models.sharded import linearize_on

LONG = 8192
"""Tokens from which the singular vectors are searched for in bfloat16 on a GPU."""

STEPS = (1e-5, 1e-7, 1e-3)
GROSS = 0.05
"""Relative finite-difference steps, of which the best counts, and the error beyond rounding."""


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
