"""Run a model or one of its modules for a measurement, in true float64 if asked for.

A preflight compares the model on lipscope's attention with eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lipscope._types import UserError
from lipscope.models.attention import NAME, AttentionCall, listening, using_attention
from lipscope.models.capture import Captured, RecordedCall, Tap, capture, first_tensor, leaves
from lipscope.models.model_files import on_one_line
from lipscope.models.structure import Event, watching

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
        return func(*(_promoted(args) if func in PRODUCTS else args), **kwargs)


def _promoted(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments, all in float64 if any of them is."""
    if not any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args):
        return args
    return [a.double() if isinstance(a, Tensor) and a.dtype in REDUCED else a for a in args]


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
        raise _Found(found.value.hidden if found.side == "input" else first_tensor(found.value))

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

    def stop(attention: AttentionCall) -> NoReturn:
        raise _Found(attention)

    with runner.ready(), listening(stop):
        try:
            runner.run(module, call)
        except _Found as found:
            return found.args[0]
    raise AssertionError(f"{type(module).__name__} made no attention call")


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Preflight:
    """A forward pass with lipscope's attention compared with an eager one, on n tokens.

    calls:      how often the model called lipscope's attention
    routed:     whether the model can be measured on lipscope's attention; if not, `reason` says
                why, and its blocks are measured on eager attention
    difference: ||y - y_eager|| / ||y_eager|| of the last hidden state, where y is computed with the
                attention that is measured
    hidden:     whether the output has an axis of tokens, as hidden states do; scores have none
    """

    n: int
    calls: int
    difference: float
    routed: bool
    reason: str = ""
    hidden: bool = True


def preflight(
    runner: ModelRunner, inputs: RecordedCall, watched: Iterable[nn.Module]
) -> tuple[Preflight, list[Event]]:
    """Run the model twice on `inputs`, a batch of one.

    Returns:
        The comparison, and what passed through `watched` modules on lipscope's attention.
    """
    name = type(runner.trunk).__name__
    try:
        with torch.no_grad():
            eager = _last_hidden_state(replace(runner, implementation="eager"), inputs)
    except Exception as error:  # each model raises its own kind of error
        raise UserError(
            f"{name} does not run on {', '.join(inputs.kwargs)} ({on_one_line(error)}); "
            "if it needs more inputs, give them all: load(...).sites(inputs={...})"
        ) from error
    if eager.ndim < 2:
        raise UserError(
            f"{name} gives a tensor of shape {tuple(eager.shape)}, not hidden states of tokens; "
            "choose a model with a transformer trunk"
        )
    if not eager.isfinite().all():
        raise UserError(
            f"{name} gives non-finite values: some of its weights are missing or too large; "
            "check its weight files"
        )
    if not eager.any():
        raise UserError(
            f"{name} maps every token to zero: its weights are all 0; check its weight files"
        )
    members = [
        m for parent in runner.trunk.modules() if isinstance(parent, nn.ModuleList) for m in parent
    ]
    ours = None
    difference = 0.0
    # With gradients on, as in a measurement: a mask that depends on the input then shows here.
    with leaves(members), watching(watched) as events:
        try:
            ours = _last_hidden_state(runner, inputs)
        except Exception as error:
            reason = f"{name} does not run on lipscope's attention ({on_one_line(error)})"
    calls = sum(event.side == "heads" for event in events)
    if ours is not None and not calls:
        reason = f"{name} uses its own attention code, which lipscope cannot replace"
    elif ours is not None:
        difference = float((ours - eager).double().norm() / eager.double().norm())
        reason = f"{name} on lipscope's attention differs from eager attention by {difference:.1e}"
    routed = ours is not None and calls > 0 and difference <= TOLERANCE[runner.dtype]
    check = Preflight(
        n=eager.shape[1],
        calls=calls,
        difference=difference if routed else 0.0,
        routed=routed,
        reason="" if routed else reason,
        hidden=eager.ndim > 2,
    )
    return check, events


def _last_hidden_state(runner: ModelRunner, inputs: RecordedCall) -> Tensor:
    with runner.ready():
        return first_tensor(runner.run(runner.trunk, inputs)).detach()
