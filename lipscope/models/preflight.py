"""Preflight check: does the model run on lipscope's attention and agree with eager attention?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.models.capture import RecordedCall, first_tensor, leaves
from lipscope.models.model_files import on_one_line
from lipscope.models.running import ModelRunner
from lipscope.models.structure import Event, watching

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
