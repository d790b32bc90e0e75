"""Forward mode, double backward and backward through the tangent, in every dtype and on a GPU.

The truth is attention written down in float64 and differentiated by torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import lipscope as ls

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.bfloat16: 1.5e-2,
    torch.float16: 2e-3,
}
"""Largest error relative to float64, in the Frobenius norm."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    t = q @ k.mT / q.shape[-1] ** 0.5
    seen = torch.ones(t.shape[-2:], dtype=torch.bool, device=t.device)
    seen = seen.tril(t.shape[-1] - t.shape[-2]) if causal else seen
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        t = t + mask
    t = t.masked_fill(~seen, -torch.inf)
    e = torch.exp(t - t.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True) @ v


def problem(dtype: torch.dtype, device: str, kind: str):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    H, G, n, keys, size = {"large": (2, 2, 150, 150, 64)}.get(kind, (4, 2, 37, 41, 8))
    shapes = (2, H, n, size), (2, G, keys, size), (2, G, keys, size)
    mask = None
    if kind == "boolean":
        mask = (torch.rand(2, 1, n, keys, generator=generator) < 0.6).to(device)
        mask[..., 0] = True
    elif kind == "additive":
        mask = torch.randn(1, H, n, keys, generator=generator).to(device)
    return [draw(*s) for s in shapes], [draw(*s) for s in shapes], mask, kind == "causal"


def nested_forward(f, x, d):
    return torch.func.jvp(f, tuple(x), tuple(d))


def dual_numbers(f, x, d):
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(*pair) for pair in zip(x, d, strict=True))
        return forward_ad.unpack_dual(f(*duals))


def gradient(f, x, d):
    """J d by two backward passes, and what a gradient penalty needs."""
    o = f(*x)
    g = torch.ones_like(o, requires_grad=True)
    back = torch.autograd.grad(o, x, g, create_graph=True)
    (moved,) = torch.autograd.grad(back, g, d, create_graph=True)
    return o, moved


WAYS = {"torch.func.jvp": nested_forward, "dual numbers": dual_numbers, "double backward": gradient}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "boolean", "additive", "large"])
@pytest.mark.parametrize("way", WAYS)
def test_value_tangent_and_backward_through_both(way, kind, dtype, device):
    point, tangent, mask, causal = problem(dtype, device, kind)
    found = []
    for exact in (False, True):
        x = [(t.double() if exact else t).clone().requires_grad_() for t in point]
        d = [(t.double() if exact else t).clone().requires_grad_() for t in tangent]

        def attention(q: Tensor, k: Tensor, v: Tensor, exact: bool = exact) -> Tensor:
            if exact:
                return written_out(q, k, v, mask, causal)
            return ls.attend(q, k, v, mask=mask, causal=causal)

        o, moved = WAYS[way](attention, x, d)
        assert o.dtype == moved.dtype == x[0].dtype
        loss = (1.3 * o.double()).sin().sum() + (0.7 * moved.double()).cos().sum()
        found.append((o, moved, *torch.autograd.grad(loss, [*x, *d])))
    for mine, truth in zip(*found, strict=True):
        error = (mine.double() - truth.double()).norm() / truth.double().norm()
        assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_the_value_alone_has_the_ordinary_gradient_inside_a_jvp(device):
    """As in losses that stop the gradient of the tangent."""
    point, tangent, *_ = problem(torch.float32, device, "plain")
    x = [t.clone().requires_grad_() for t in point]
    o, moved = torch.func.jvp(ls.attend, tuple(x), tuple(tangent))
    assert moved.requires_grad
    inside = torch.autograd.grad(o.sin().sum(), x)
    outside = torch.autograd.grad(ls.attend(*x).sin().sum(), x)
    for mine, truth in zip(inside, outside, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)


def test_checkpointing_keeps_tangents_and_gradients():
    from torch.utils.checkpoint import checkpoint

    point, *_ = problem(torch.float64, "cpu", "plain")
    x = [t.clone().requires_grad_() for t in point]
    plain = torch.autograd.grad(ls.attend(*x).square().sum(), x)
    o = checkpoint(ls.attend, *x, use_reentrant=False)
    for mine, truth in zip(torch.autograd.grad(o.square().sum(), x), plain, strict=True):
        torch.testing.assert_close(mine, truth)


COMPILED = """
import torch
import lipscope as ls
q, k, v = torch.randn(3, 2, 4, 37, 8, dtype=torch.float64).unbind()
for options in ({}, {"causal": True}, {"window": 5}):
    f = lambda q, k, v: ls.attend(2 * q, k, v, **options).square()
    # Plain and causal attention stay in the graph; a window breaks it and stays right.
    g = torch.compile(f, backend="aot_eager", fullgraph="window" not in options)
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    results = [(h(*x), *torch.autograd.grad(h(*x).sum(), x)) for h in (f, g)]
    for mine, truth in zip(*results):
        torch.testing.assert_close(mine, truth)
"""


@pytest.mark.wide
def test_compiled_forward_and_backward():
    """In a process of its own: run-time type checks of the tests cannot be compiled."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


MOVED = {
    "jvp of a grad": lambda f, x, b, d: torch.func.jvp(
        lambda b: torch.func.grad(lambda x: f(x, b).square().sum())(x), (b,), (d,)
    ),
    "jvp of a jvp": lambda f, x, b, d: torch.func.jvp(
        lambda b: torch.func.jvp(lambda x: f(x, b), (x,), (x,))[1], (b,), (d,)
    ),
    "grad of a jvp": lambda f, x, b, d: torch.func.grad(
        lambda b: torch.func.jvp(lambda x: f(x, 2 * b), (x,), (x,))[1].sum()
    )(b),
    "grad of a vmap": lambda f, x, b, d: torch.func.grad(
        lambda b: torch.func.vmap(lambda x: f(x, b * x.mean()))(x[None]).square().sum()
    )(b),
    "backward of a jvp": lambda f, x, b, d: (
        torch.func.jvp(lambda x: f(x * b.sum(), b), (x,), (x,))[1].sum().backward()
    ),
}


@pytest.mark.parametrize("way", MOVED)
@pytest.mark.parametrize("what", ["mask", "sinks"])
def test_a_derivative_of_mask_or_sinks_is_refused_at_every_level(what, way):
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    b = torch.randn(*((5, 5) if what == "mask" else (2,)), dtype=torch.float64)
    b.requires_grad_("backward" in way)

    def f(x, b):
        return ls.attend(x, x, x, **{what: b})

    with pytest.raises(ls.UserError, match=r"as (a )?constants?"):
        MOVED[way](f, x, b, torch.ones_like(b))


def test_a_tangent_that_requires_grad_where_the_values_do_not():
    q, k, v, d = torch.randn(4, 2, 5, 4, dtype=torch.float64).unbind()
    d.requires_grad_()
    with forward_ad.dual_level():
        o, moved = forward_ad.unpack_dual(ls.attend(forward_ad.make_dual(q, d), k, v))
    (back,) = torch.autograd.grad(moved.sum(), d)
    expected = torch.func.vjp(lambda q: ls.attend(q, k, v), q)[1](torch.ones_like(o))[0]
    torch.testing.assert_close(back, expected)


def test_a_scale_may_be_a_tensor_and_has_derivatives():
    q, k, v = torch.randn(3, 2, 5, 4, dtype=torch.float64).unbind()
    s, ds = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    _, found = torch.func.jvp(lambda q, s: ls.attend(q, k, v, scale=s), (q, s), (k, ds))
    _, truth = torch.func.jvp(lambda q, s: torch.softmax(s * q @ k.mT, -1) @ v, (q, s), (k, ds))
    torch.testing.assert_close(found, truth)


def test_linearize_with_several_tiles(monkeypatch):
    from lipscope.fused import tiled

    monkeypatch.setattr(tiled, "TILE", 8)
    x, d = torch.randn(2, 1, 9, 4, dtype=torch.float64).unbind()

    def f(x):
        return ls.attend(x, 2 * x, x.sin()).square().sum()

    found = torch.func.linearize(f, x)[1](d)
    torch.testing.assert_close(found, torch.func.jvp(f, (x,), (d,))[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_scale_costs_half_precision_no_digits(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (4 * torch.randn(1, 2, 33, 96, generator=generator).to(dtype) for _ in range(3))
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    out, truth = ls.attend(*x), written_out(*exact, None, False)
    assert (out.double() - truth).norm() <= 0.01 * truth.norm() * (dtype == torch.bfloat16 or 0.1)
    mine = torch.autograd.grad(out.sum(), x)
    for found, expected in zip(mine, torch.autograd.grad(truth.sum(), exact), strict=True):
        assert (found.double() - expected).norm() <= 0.01 * expected.norm()


def test_gradients_under_autocast_belong_to_the_value():
    generator = torch.Generator().manual_seed(0)
    x = [3 * torch.randn(1, 2, 17, 64, generator=generator) for _ in range(3)]
    results = []
    for inside in (True, False):
        point = [t.clone().requires_grad_() for t in x]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = ls.attend(*point)
        results.append((out, *torch.autograd.grad(out.sum(), point)))
    for mine, truth in zip(*results, strict=True):
        torch.testing.assert_close(mine, truth)
    with torch.autocast("cpu", torch.bfloat16):
        found = ls.scaled_dot_product_attention(*x)
        truth = torch.nn.functional.scaled_dot_product_attention(*x)
    assert found.dtype == truth.dtype == torch.bfloat16


def test_a_float64_mask_with_float32_queries():
    q, k, v = torch.randn(3, 2, 5, 4).unbind()
    mask = torch.randn(5, 5, dtype=torch.float64)
    out = ls.attend(q, k, v, mask=mask)
    torch.testing.assert_close(out, ls.attend(q, k, v, mask=mask.float()))
    assert out.dtype == torch.float32
