"""Run one module of a model on given tokens, and read a value from inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from lipscope.models.capture import Captured, RecordedCall, capture, first_tensor
from lipscope.models.plug import NAME, AttentionCall, listening, using_attention
from lipscope.models.precision import Float64


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


class Tap(NamedTuple):
    """Where a value is read: at the "input" or the "output" of a module."""

    module: nn.Module
    side: str


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
