"""Formats against arithmetic written out entry by entry."""

import math

import pytest
import torch

from lipscope._types import UserError
from lipscope.probes.budget.formats import affine, fp8, read_format, read_formats, symmetric

W = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def naive_symmetric(row, bits):
    q = 2 ** (bits - 1) - 1
    scale = max(abs(x) for x in row) / q
    return [round(x / scale) * scale for x in row]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symmetric_is_rounding_by_row(bits):
    expected = [naive_symmetric(row, bits) for row in W.tolist()]
    assert torch.allclose(symmetric(W, bits), torch.tensor(expected, dtype=W.dtype), atol=1e-14)


@pytest.mark.parametrize("group", [4, 5, 12, 20])
def test_groups_have_a_scale_of_their_own_and_the_last_may_be_shorter(group):
    expected = [
        [y for i in range(0, 12, group) for y in naive_symmetric(row[i : i + group], 4)]
        for row in W.tolist()
    ]
    got = read_format(f"int4:{group}").weight(W)
    assert torch.allclose(got, torch.tensor(expected, dtype=W.dtype), atol=1e-14)


def test_affine_keeps_the_extremes_and_has_the_right_number_of_values():
    x = torch.rand(3, 400, dtype=torch.float64) + 5
    y = affine(x, 4)
    assert torch.allclose(y.amin(-1), x.amin(-1)) and torch.allclose(y.amax(-1), x.amax(-1))
    assert all(len(row.mul(1e9).round().unique()) == 16 for row in y)
    assert ((y - x).abs().amax(-1) <= (x.amax(-1) - x.amin(-1)) / 30 * (1 + 1e-9)).all()


def test_fp8_rounds_to_the_nearest_value_of_e4m3():
    # Every non-negative e4m3 value: subnormals m / 8 * 2^-6, normals (1 + m / 8) 2^(e - 7).
    grid = [m / 8 * 2**-6 for m in range(8)]
    grid += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    grid = sorted(g for g in grid if g <= 448)
    scale = W.abs().max().item() / 448
    for x, y in zip(W.flatten().tolist(), fp8(W).flatten().tolist(), strict=True):
        nearest = min(grid, key=lambda g: abs(g - abs(x) / scale))
        assert math.isclose(abs(y), nearest * scale, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["int8", "int4:32", "fp8", "kv4"])
def test_zeros_stay_zero(name):
    f = read_format(name)
    zero = torch.zeros(2, 40, dtype=torch.float64)
    assert torch.equal((f.weight or f.cache)(zero), zero)


def test_names_say_what_is_rounded():
    w8a8, kv8, bf16 = read_formats("w8a8, kv8,bf16")
    assert w8a8.weight and w8a8.activation and not w8a8.cache
    assert kv8.cache and not kv8.weight
    assert bf16.dtype == torch.bfloat16 and not bf16.weight


@pytest.mark.parametrize("name", ["int9", "int", "int4:0", "kv", "fp4", ""])
def test_an_unknown_format_is_an_error(name):
    with pytest.raises(UserError, match="there is no format"):
        read_format(name)
    with pytest.raises(UserError, match="at least one format"):
        read_formats([])


def test_a_format_of_the_users_own_is_checked():
    (own,) = read_formats({"halves": lambda x: (2 * x).round() / 2})
    assert own.name == "halves" and torch.equal(own.weight(W), (2 * W).round() / 2)
    (bad,) = read_formats({"bad": lambda x: x[:1]})
    with pytest.raises(UserError, match="'bad' must return a tensor of the shape"):
        bad.weight(W)


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "int8", "int3", "kv8", "kv4", "w4a8", "w8a4", "w3a3"]
)
def test_the_step_of_a_format_is_its_largest_error(name):
    f = read_format(name)
    x = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    if f.dtype is not None:
        error = ((x.to(f.dtype).double() - x) / x.abs().clamp_min(1e-3)).abs().max()
    else:
        used = [q for q in (f.weight, f.activation, f.cache) if q]
        # An affine format has all its numbers between the smallest and the largest entry.
        error = max((q(x) - x).abs().max() for q in used) / (2 if f.cache else 1)
    assert 0.9 * f.step <= error <= f.step * (1 + 1e-9)


def test_the_step_of_a_function_is_not_known():
    (own,) = read_formats({"own": lambda w: 3 * w})
    assert own.step == torch.inf
