"""torch's attention replaced: its conventions, its errors, and the derivatives it does not have."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention as torchs_own

import lipscope as ls

mine = ls.scaled_dot_product_attention


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def point(lead=(2, 4), keys=7):
    return draw(*lead, 5, 8), draw(*lead, keys, 8, seed=1), draw(*lead, keys, 6, seed=2)


CASES = {
    "plain": {},
    "causal with more keys than queries": {"is_causal": True},
    "boolean mask": {"attn_mask": draw(5, 7, seed=3) < 1},
    "mask of keys": {"attn_mask": torch.tensor([True, False, True, True, True, False, True])},
    "additive mask by member": {"attn_mask": draw(2, 1, 5, 7, seed=4)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values_and_gradients_are_torchs(options):
    inputs = [x.requires_grad_() for x in point()]
    expected_options = dict(options)
    mask = options.get("attn_mask")
    if mask is not None and mask.ndim == 1:
        expected_options["attn_mask"] = mask.expand(5, 7)
    results = []
    for attention, given in ((mine, options), (torchs_own, expected_options)):
        out = attention(*inputs, **given)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("q", "k", "options"),
    [
        ((5, 8), (7, 8), {}),
        ((4, 5, 8), (4, 7, 8), {}),
        ((2, 4, 5, 8), (1, 4, 7, 8), {}),
        ((2, 4, 5, 8), (2, 1, 7, 8), {}),
        ((2, 1, 5, 8), (2, 4, 7, 8), {}),
        ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), {"is_causal": True}),
    ],
)
def test_shapes_broadcast_as_in_torch(q, k, options):
    query, key, value = draw(*q), draw(*k, seed=1), draw(*k, seed=2)
    out = mine(query, key, value, **options)
    torch.testing.assert_close(out, torchs_own(query, key, value, **options))


def test_a_fully_masked_row_is_zero_in_value_and_derivatives():
    inputs = [x.requires_grad_() for x in point()]
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out = mine(*inputs, attn_mask=mask)
    assert torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)
    assert torch.equal(gradients[0][:, :, 2], torch.zeros_like(gradients[0][:, :, 2]))


def test_what_cannot_be_differentiated_is_refused():
    q, k, v = point()
    with pytest.raises(ls.UserError, match="dropout_p must be 0"):
        mine(q, k, v, dropout_p=0.1)
    with pytest.raises(ls.UserError, match="exclude each other"):
        mine(q, k, v, attn_mask=torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    with pytest.raises(ls.UserError, match="enable_gqa=True"):
        mine(q, k[:, :2], v[:, :2])
    with pytest.raises(ls.UserError, match="mask requires grad"):
        mine(q, k, v, attn_mask=torch.zeros(5, 7, requires_grad=True))
    with forward_ad.dual_level(), pytest.raises(ls.UserError, match="carry a tangent"):
        mask = forward_ad.make_dual(draw(5, 7), draw(5, 7))
        mine(forward_ad.make_dual(q, q), k, v, attn_mask=mask)


def by_name(x):
    return torchs_own(x, x, x)


def by_attribute(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("f", [by_name, by_attribute])
def test_everywhere_reaches_functions_however_they_were_imported(f):
    x, dx = draw(2, 5, 8), draw(2, 5, 8, seed=1)
    with ls.attend_everywhere():
        _, found = torch.func.jvp(f, (x,), (dx,))
    h = 1e-6
    torch.testing.assert_close(found, (f(x + h * dx) - f(x - h * dx)) / (2 * h), rtol=0, atol=1e-8)


def test_everywhere_reaches_torchs_modules_and_ends():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x, dx = draw(2, 5, 8), draw(2, 5, 8, seed=1)

    def f(x):
        return layer(x, x, x, need_weights=False)[0]

    with ls.attend_everywhere():
        _, found = torch.func.jvp(f, (x,), (dx,))
    h = 1e-6
    torch.testing.assert_close(found, (f(x + h * dx) - f(x - h * dx)) / (2 * h), rtol=0, atol=1e-8)
    assert torch.nn.functional.scaled_dot_product_attention is torchs_own
    with pytest.raises(ZeroDivisionError), ls.attend_everywhere():
        raise ZeroDivisionError
    assert torch.nn.functional.scaled_dot_product_attention is torchs_own


def test_everywhere_ends_with_the_last_of_several_threads():
    first, second = ls.attend_everywhere(), ls.attend_everywhere()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is mine
    second.__exit__(None, None, None)
    assert torch.nn.functional.scaled_dot_product_attention is torchs_own
