"""Checks shared by several packages: norms and devices by name."""

import math

import pytest
import torch

import lipscope as ls
from lipscope._checks import norm_name, usable_device


def test_numbers_stand_for_the_first_two_norms():
    assert [norm_name(norm) for norm in ("2", 2, 2.0, "inf", math.inf)] == ["2"] * 3 + ["inf"] * 2
    assert norm_name("W2", ("2", "W2")) == "W2"


@pytest.mark.parametrize("norm", [1, True, "1", "W2", None, -math.inf, math.nan, [2]])
def test_another_norm_is_named(norm):
    with pytest.raises(ls.UserError, match="norm must be '2' or 'inf', got"):
        norm_name(norm)


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:99", ""])
def test_a_device_that_cannot_hold_a_number_is_named(name):
    with pytest.raises(ls.UserError, match=f"device '{name}' cannot be used here"):
        usable_device(name)


def test_a_device_that_can_is_returned():
    assert usable_device("cpu") == torch.device("cpu")
