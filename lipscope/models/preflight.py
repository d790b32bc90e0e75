"""Preflight check: does the model run on lipscope's attention and agree with eager attention?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.models.model_files import on_one_line
from lipscope.models.plug import AttentionCall, listening
from lipscope.models.running import Host, ModuleCall, first_tensor, leaves

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Preflight:
    """A forward pass with lipscope's attention compared with an eager one, on n tokens.

    calls:      how often the model called lipscope's attention
    cores:      the modules that called it, with their numbers of heads
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
    cores: dict[nn.Module, int] = field(default_factory=dict, repr=False, compare=False)
    hidden: bool = True


def preflight(host: Host, inputs: ModuleCall) -> Preflight:
    """Run the model twice on `inputs`, a batch of one."""
    name = type(host.trunk).__name__
    try:
        with torch.no_grad():
            eager = _last_hidden_state(replace(host, implementation="eager"), inputs)
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
    calls = 0
    cores = dict[nn.Module, int]()
    members = [
        m for parent in host.trunk.modules() if isinstance(parent, nn.ModuleList) for m in parent
    ]

    def count(call: AttentionCall) -> Tensor:
        nonlocal calls
        calls += 1
        cores.setdefault(call.module, call.q.shape[1])
        return call.output()

    check = Preflight(
        n=eager.shape[1], calls=0, difference=0.0, routed=False, cores=cores, hidden=eager.ndim > 2
    )
    try:
        # With gradients on, as in a measurement: a mask that depends on the input then shows here.
        with listening(count), leaves(members):
            ours = _last_hidden_state(host, inputs)
    except Exception as error:
        reason = f"{name} does not run on lipscope's attention ({on_one_line(error)})"
        return replace(check, calls=calls, reason=reason)
    if calls == 0:
        reason = f"{name} uses its own attention code, which lipscope cannot replace"
        return replace(check, reason=reason)
    difference = float((ours - eager).double().norm() / eager.double().norm())
    if not difference <= TOLERANCE[host.dtype]:
        reason = f"{name} on lipscope's attention differs from eager attention by {difference:.1e}"
        return replace(check, calls=calls, reason=reason)
    return replace(check, calls=calls, difference=difference, routed=True)


def _last_hidden_state(host: Host, inputs: ModuleCall) -> Tensor:
    with host.ready():
        return first_tensor(host.run(host.trunk, inputs)).detach()
