"""Modules of others: unwrap them, refuse sharded weights, evaluate them without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lipscope._ambient import live_modules
from lipscope._torch_internals import compiled_call, compiled_module_class
from lipscope._types import UserError

SHARDED = (
    "the weights are sharded among processes (FSDP, ZeRO-3), and no process has all of them; "
    "use DistributedDataParallel, or a copy on one process"
)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DistributedDataParallel and DataParallel.

    Args:
        model: A module, wrapped any number of times or not at all.

    Returns:
        The innermost module.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> layer = torch.nn.Linear(4, 4)
        >>> ls.nn.unwrapped(torch.nn.DataParallel(layer)) is layer
        True
    """
    while True:
        if is_compiled_copy(model):
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def is_compiled_copy(module: nn.Module) -> bool:
    """Return whether torch.compile made it."""
    # If the compiler has not been imported, it has made nothing: do not import it for the question.
    made = compiled_module_class()
    return made is not None and isinstance(module, made)


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by their names in the unwrapped model, without the wrappers of the compiler."""
    inside = "._orig_mod"
    named = unwrapped(model).named_modules()
    return {f".{name}".replace(inside, "")[1:]: m for name, m in named if not is_compiled_copy(m)}


def check_whole(module: nn.Module) -> None:
    """Refuse sharded weights: reading them would fail, or wait for other processes forever."""
    for m in module.modules():
        plain = (value for value in vars(m).values() if isinstance(value, Tensor))
        if any(_is_part(tensor) for tensor in (*m.parameters(recurse=False), *plain)):
            raise UserError(SHARDED)


def _is_part(tensor: Tensor) -> bool:
    """Whether a tensor is a shard: DTensor, FSDP (a flat piece, or freed storage), or ZeRO-3."""
    if (
        hasattr(tensor, "placements")
        or hasattr(tensor, "_fsdp_flattened")
        or hasattr(tensor, "ds_id")
    ):
        return True
    # Subclasses and meta tensors have no storage in the first place.
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta"
    return plain and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def check_bare(model: nn.Module) -> None:
    """Refuse to replace layers inside a wrapper, which would keep using the old ones."""
    check_whole(model)
    wrapper = next(
        (m for m in model.modules() if unwrapped(m) is not m or compiled_call(m) is not None),
        None,
    )
    if wrapper is not None:
        compiled = compiled_call(wrapper) is not None or is_compiled_copy(wrapper)
        kind = "torch.compile" if compiled else type(wrapper).__name__
        raise UserError(
            f"the model is wrapped in {kind}, which would keep using the old layers; convert the "
            "model itself, then wrap it"
        )


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
