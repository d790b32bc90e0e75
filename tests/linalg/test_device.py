"""Devices by name."""

import pytest
import torch

import lipscope as ls
from lipscope.linalg.device import memory_of, usable_device


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:99", ""])
def test_a_device_that_cannot_hold_a_number_is_named(name):
    with pytest.raises(ls.UserError, match=f"device '{name}' cannot be used here"):
        usable_device(name)


def test_a_device_that_can_is_given():
    device = usable_device("cpu")
    assert device == torch.device("cpu") and memory_of(device) > 1 << 28
