"""Devices by name, tried out before anything is put on them."""

from __future__ import annotations

import os

import torch

from lipscope._types import UserError


def usable_device(name: str) -> torch.device:
    """The device of this name, if it can hold a number and give it back."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device, dtype=torch.float64).sum().item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"device {name!r} cannot be used here ({reason}); try cpu") from error
    return device


def memory_of(device: torch.device) -> int:
    """All the bytes a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
