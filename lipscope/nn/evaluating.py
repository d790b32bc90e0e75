"""Evaluate a module without side effects: its mode and its tensor attributes are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lipscope._ambient import live_modules


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode with up-to-date weights; every module is restored on exit."""
    with live_modules, attributes_kept(module):
        modes = [(m, m.training) for m in module.modules()]
        try:
            for m, _ in modes:
                m.training = False
            _make_weights(module)
            yield
        finally:
            for m, training in modes:
                m.training = m.training or training  # a mode that its owner set meanwhile stays


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore tensors in plain attributes, such as the weights of torch's older spectral_norm."""
    kept = [
        (m, {name: t for name, t in vars(m).items() if isinstance(t, Tensor)})
        for m in module.modules()
    ]
    try:
        yield
    finally:
        for m, tensors in kept:
            vars(m).update(tensors)


@torch.no_grad()
def _make_weights(module: nn.Module) -> None:
    """Recompute the weights that hooks make in a forward pass."""
    # They are stale: the optimizer has changed what they are computed from since the last pass.
    # torch's attention reads the weight of out_proj without calling it, so its hook never runs.
    uncalled = {m.out_proj for m in module.modules() if isinstance(m, nn.MultiheadAttention)}
    for m in module.modules():
        for hook in m._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm | WeightNorm) and m not in uncalled:
                hook(m, ())
