"""The Triton kernels against naive float64 attention, in Triton's interpreter and on a GPU.

The interpreter is chosen when triton is imported, for good: a subprocess runs this file.
It multiplies bf16 wrongly, so bf16 is left to the GPU.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

TOLERANCE = {"pair": 1e-6, "float16": 6e-4, "bfloat16": 5e-3}
"""Largest error relative to float64, in the Frobenius norm."""


@dataclass(frozen=True)
class Case:
    """Shapes, size of the tangents, sharpness of the scores, and spans of one problem."""

    B: int = 1
    H: int = 2
    G: int = 2
    n: int = 149
    keys: int = 149
    k: int = 64
    m: int = 64
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    ahead: int = 0  # keys after a query that causal order lets it see
    padded: bool = False
    padded_read: bool = False  # whether padded tokens read others, as they do in models
    size: float = 1.0
    sharp: float = 1.0
    span: int | None = None
    mask: str | None = None  # boolean, additive, blocks (boolean with empty tiles), or one row
    mask_shape: tuple[int, int] = (1, 1)  # its batch and heads


CASES = {
    "everything visible": Case(),
    "five tokens": Case(H=6, G=6, n=5, keys=5, k=32, m=32),
    "causal, grouped, padded": Case(
        B=2, H=4, G=2, n=133, keys=133, k=40, m=24, causal=True, padded=True
    ),
    "window, softcap, more keys": Case(
        G=1, n=101, keys=187, k=33, m=33, causal=True, window=50, softcap=3.0
    ),
    "sinks, more queries": Case(
        G=1, n=187, keys=101, k=33, m=80, causal=True, window=90, sinks=True
    ),
    "window without order": Case(n=187, keys=187, k=48, m=48, window=30),
    "large head": Case(H=1, G=1, n=77, keys=77, k=128, m=100, causal=True),
    "tiny tangents": Case(H=1, G=1, n=77, keys=77, k=32, m=32, size=1e-20),
    "nearly one-hot": Case(H=1, G=1, n=77, keys=77, k=64, m=64, sharp=20.0),
    "spans": Case(H=2, G=1, n=275, keys=275, k=32, m=16, span=256),
    "spans, causal, padded": Case(
        B=2, H=1, G=1, n=277, keys=277, k=16, m=32, causal=True, padded=True, span=128
    ),
    "spans, window": Case(H=1, G=1, n=200, keys=300, k=32, m=32, causal=True, window=170, span=128),
    "spans, window without order": Case(
        H=1, G=1, n=300, keys=280, k=32, m=32, window=140, softcap=3.0, span=128
    ),
}
CASES |= {
    "boolean mask": Case(mask="boolean"),
    "boolean mask by head and member, causal, padded": Case(
        B=2,
        H=4,
        G=2,
        n=133,
        keys=133,
        k=40,
        m=24,
        causal=True,
        padded=True,
        mask="boolean",
        mask_shape=(2, 4),
    ),
    "additive mask by head, softcap, sinks": Case(
        B=2,
        H=2,
        G=1,
        n=101,
        keys=187,
        k=33,
        m=33,
        softcap=3.0,
        sinks=True,
        mask="additive",
        mask_shape=(1, 2),
    ),
    "blocks, window": Case(B=2, n=300, keys=300, window=200, mask="blocks", mask_shape=(2, 1)),
    "blocks, spans": Case(G=1, n=275, keys=277, k=32, m=16, span=128, mask="blocks"),
    "additive mask, spans, causal, padded": Case(
        B=2, n=277, keys=277, k=16, m=32, causal=True, padded=True, span=128, mask="additive"
    ),
}
CASES |= {
    "boolean mask by member, causal, padded keys": Case(
        B=2,
        n=152,
        keys=152,
        k=32,
        m=32,
        causal=True,
        window=90,
        padded=True,
        padded_read=True,
        mask="boolean",
        mask_shape=(2, 1),
    ),
}
CASES |= {
    "one row of a mask": Case(B=2, n=70, keys=150, k=32, m=32, mask="row", mask_shape=(2, 1)),
    "one row of a mask, causal": Case(n=150, keys=150, k=32, m=32, causal=True, mask="row"),
    "boolean mask, large head": Case(B=2, n=148, keys=180, k=96, mask="boolean", mask_shape=(1, 2)),
}
CASES |= {
    "two-sided window": Case(n=187, keys=187, k=48, m=48, causal=True, window=61, ahead=30),
    "spans, two-sided window": Case(
        H=1, G=1, n=300, keys=300, k=32, m=32, causal=True, window=281, ahead=140, span=128
    ),
    "two-sided window, padded keys": Case(
        B=2,
        G=1,
        n=133,
        keys=133,
        k=32,
        m=16,
        causal=True,
        window=25,
        ahead=12,
        padded=True,
        padded_read=True,
    ),
}
INTERPRETED = [(name, "pair") for name in CASES] + [
    ("causal, grouped, padded", "float16"),
    ("window, softcap, more keys", "float16"),
    ("nearly one-hot", "float16"),
    ("boolean mask", "float16"),
    ("boolean mask, large head", "float16"),
    ("boolean mask by head and member, causal, padded", "float16"),
    ("boolean mask by member, causal, padded keys", "float16"),
    ("blocks, window", "float16"),
    ("sinks, more queries", "float16"),
]

QUICK = (
    ("five tokens", "pair"),
    ("window, softcap, more keys", "pair"),
    ("sinks, more queries", "float16"),
    ("large head", "pair"),
    ("nearly one-hot", "float16"),
    ("spans, window without order", "pair"),
    ("boolean mask by head and member, causal, padded", "float16"),
    ("additive mask, spans, causal, padded", "pair"),
    ("boolean mask by member, causal, padded keys", "float16"),
    ("blocks, window", "float16"),
    ("blocks, spans", "pair"),
    ("one row of a mask, causal", "pair"),
    ("two-sided window, padded keys", "pair"),
)
"""Those that `make test` runs; `make slow` runs the others."""


def naive(
    q: Tensor, k: Tensor, v: Tensor, case: Case, seen: Tensor, sinks: Tensor | None, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention as it is written down, and its log-sum-exp; a row that sees nothing is zero."""
    k, v = (x.repeat_interleave(case.H // case.G, dim=1) for x in (k, v))
    t = q @ k.mT
    t = t if case.softcap is None else case.softcap * torch.tanh(t / case.softcap)
    dead = ~seen.any(-1, keepdim=True)
    t = t + bias.expand_as(t).masked_fill(dead, 0)
    t = t.masked_fill(~(seen | dead), -math.inf)
    if sinks is not None:
        t = torch.cat([t, sinks[:, None, None].expand(*t.shape[:-1], 1)], dim=-1)
    P = torch.softmax(t, dim=-1)[..., : k.shape[-2]].masked_fill(dead, 0)
    return P @ v, torch.logsumexp(t, -1).masked_fill(dead[..., 0], -math.inf)


def visibility(case: Case, real: Tensor | None, device: str) -> Tensor:
    i = torch.arange(case.n, device=device)[:, None] + case.keys - case.n + case.ahead
    j = torch.arange(case.keys, device=device)[None, :]
    seen = torch.ones(case.n, case.keys, dtype=torch.bool, device=device)
    seen = seen & (j <= i) if case.causal else seen
    seen = seen if case.window is None else seen & (j > i - case.window)
    seen = seen.expand(case.B, 1, -1, -1)
    if real is None:
        return seen
    seen = seen & real[:, None, None, :]
    return seen if case.padded_read else seen & real[:, None, :, None]


def explicit_mask(case: Case, device: str) -> Tensor | None:
    """A mask with a row that sees nothing; additive ones carry a large constant in some rows."""
    shape = (*case.mask_shape, case.n, case.keys)
    if case.mask == "row":
        return torch.rand(*case.mask_shape, 1, case.keys, device=device) < 0.6
    if case.mask is None:
        return None
    if case.mask == "blocks":
        near = torch.zeros(case.n, case.keys, dtype=torch.bool, device=device)
        near[:128, 128:], near[200:, :70] = True, True  # and a line of tiles that are all empty
        return near.expand(shape).clone()
    seen = torch.rand(shape, device=device) < 0.6
    seen[..., 3, :] = False
    if case.mask == "boolean":
        return seen
    bias = torch.randn(shape, device=device).masked_fill(~seen, -math.inf)
    bias[..., 5, :] -= 1e9
    return bias


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN, or far away, so that what a kernel forgets shows up."""
    empty = torch.empty

    def poison(*args: Any, **options: Any) -> Tensor:
        x = empty(*args, **options)
        if x.dtype == torch.int32:
            return x.fill_(12_345_678)
        return x.fill_(math.nan) if x.dtype.is_floating_point else x

    torch.empty = poison
    try:
        yield
    finally:
        torch.empty = empty


def errors(case: Case, precision: str, device: str) -> dict[str, float]:
    """How far value, lse, tangent and cotangents are from float64, each on random inputs."""
    from lipscope.fused import triton_backward, triton_forward, triton_masks, triton_operands
    from lipscope.fused.pattern import Pattern

    torch.manual_seed(0)
    triton_operands.SPAN = case.span or 8192
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision, torch.float32)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64, device=device) * size).to(dtype).double()

    B, H, G, n, keys, k, m = case.B, case.H, case.G, case.n, case.keys, case.k, case.m
    scale = k**-0.5
    point = draw(B, H, n, k, size=case.sharp), draw(B, G, keys, k), draw(B, G, keys, m)
    dq, dk, dv = (draw(*x.shape, size=case.size) for x in point)
    g = draw(B, H, n, m, size=case.size)
    sinks = torch.randn(H, device=device) if case.sinks else None
    real = None
    if case.padded:
        real = torch.ones(B, keys, dtype=torch.bool, device=device)
        real[0, keys // 2 :], real[-1, : keys // 3] = False, False
    seen, mask = visibility(case, real, device), explicit_mask(case, device)
    bias = level = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=device)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask > -math.inf)
        if mask.dtype != torch.bool:
            bias = mask.double()
            level = bias.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
            level = level.masked_fill(level == -math.inf, 0)

    def value(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        logits = None if sinks is None else sinks.double()
        return naive(scale * q, k, v, case, seen, logits, bias)

    o, lse = value(*point)
    do = torch.func.jvp(lambda *x: value(*x)[0], point, (dq, dk, dv))[1]
    onto = torch.func.vjp(lambda *x: value(*x)[0], *point)[1](g)

    reading, shift = None if case.padded_read else real, keys - n + case.ahead
    pattern = Pattern(
        case.causal, case.window, case.softcap, mask, reading, real, sinks, shift, scale
    )
    q, k_, v, dq, dk, dv, g = (x.to(dtype) for x in (*point, dq, dk, dv, g))
    with poisoned():
        mine_o, mine_lse = triton_forward.forward(q, k_, v, pattern)
        mine_do = triton_forward.jvp(q, k_, v, mine_o, mine_lse, (dq, dk, dv), pattern)
        mine_g = triton_backward.vjp(q, k_, v, mine_o, mine_lse, g, pattern)

        mine_value = triton_forward.forward(q, k_, v, pattern, keep_digits=False)[0]
    assert mine_value.dtype == dtype

    mine, truth = [mine_o, mine_value, mine_do, *mine_g], [o, o, do, *onto]
    names = ["o", "value", "do", "gq", "gk", "gv"]
    if triton_forward.supports_one_launch(q, pattern):
        with poisoned():
            for few in (0, 256):  # a boolean mask surveyed, and as it is
                triton_masks.FEW = few
                both = triton_forward.value_and_tangent(q, k_, v, (dq, dk, dv), pattern)
                mine, truth = [*mine, *both[:2]], [*truth, o, do]
                names += [f"o at once, {few}", f"do at once, {few}"]
                assert torch.equal(both[2] == math.inf, lse == -math.inf)
    if triton_backward.supports_both_vjp(q, v, pattern):
        c = draw(*g.shape, size=case.size)
        mean = triton_forward.jvp_and_drift(q, k_, v, mine_o, mine_lse, (dq, dk, dv), pattern)[1]
        with poisoned():
            mine += triton_backward.both_vjp(
                q, k_, v, (dq, dk, dv), g, c.to(dtype), mine_o, mine_do, mine_lse, mean, pattern
            )
        inputs = [x.clone().requires_grad_() for x in (*point, *(x.double() for x in (dq, dk, dv)))]
        value_o, moved = torch.func.jvp(
            lambda *x: value(*x)[0], tuple(inputs[:3]), tuple(inputs[3:])
        )
        loss = (value_o * g.double()).sum() + (moved * c).sum()
        truth += torch.autograd.grad(loss, inputs)
        names += ["second q", "second k", "second v", "second dq", "second dk", "second dv"]
    pairs = zip(names, mine, truth, strict=True)
    found = {name: ((x.double() - y).norm() / y.norm()).item() for name, x, y in pairs}
    assert torch.equal(mine_lse == math.inf, lse == -math.inf)
    t = scale * point[0] @ point[1].repeat_interleave(H // G, dim=1).mT
    found["score"] = t.abs().max().item()
    lse = lse - level[..., 0]  # the kernels leave a row's level out
    off = (mine_lse.double() - lse) / lse.abs().clamp_min(1)
    found["lse"] = off[lse.isfinite()].abs().max().item()
    return found


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """The errors of the interpreted cases that were selected, from a process of their own."""
    tests = [item for item in request.session.items if item.name.startswith("test_interpreted[")]
    chosen = [list(item.callspec.params.values()) for item in tests]
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(chosen)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in INTERPRETED],
)
def test_interpreted(interpreted: dict[str, dict[str, float]], name: str, precision: str) -> None:
    judge(interpreted[f"{name}: {precision}"], precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, precision: str) -> None:
    if precision == "float16" and CASES[name].size < 1e-6:
        pytest.skip("float16 has no such numbers")
    judge(errors(CASES[name], precision, "cuda"), precision)


def judge(found: dict[str, float], precision: str) -> None:
    """Raises on NaN too. Scores are off by rounding of their size, weights by that relatively."""
    unit = 2**-24 * (1 + found.pop("score"))
    limit, lse = max(TOLERANCE[precision], 3 * unit), found.pop("lse")
    assert lse <= 8 * unit, f"lse off by {lse}"
    off = {name: error for name, error in found.items() if not error <= limit}
    assert not off, f"beyond {limit}: {off}"


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    torch.set_num_threads(1)
    wanted = json.loads(sys.argv[1])
    print(json.dumps({f"{name}: {p}": errors(CASES[name], p, "cpu") for name, p in wanted}))
