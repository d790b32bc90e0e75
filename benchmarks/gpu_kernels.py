"""The attention kernels on one GPU, beside a matrix product, eager attention and the library.

    python -m benchmarks.gpu_kernels                    # n = 4096 .. 131072, 12 heads x 64
    python -m benchmarks.gpu_kernels --n 16384 --head 128

J d, or J' g, is 5 matrix products of 2 n^2 k operations per head, half of that when causal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lipscope.fused import backend, tiled, triton_backward, triton_forward
from lipscope.fused.pattern import Pattern

WIDTH = 768
GOALS = {
    ("tangent", False): 0.75,
    ("tangent", True): 0.65,
    ("pair", False): 0.62,
    ("pair", True): 0.62,
}
"""Fractions of the matrix product's rate, at n = 131072."""


@dataclass(frozen=True)
class Row:
    """One number. target is None if none was set; residual is for solves."""

    name: str
    n: int
    causal: bool
    dtype: str
    value: float
    unit: str
    residual: float | None = None
    target: float | None = None
    met: bool | None = None


def seconds(f: Callable[[], object], budget: float = 1.0) -> float:
    """Median time of f on the device, after a warm-up."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):
        marks[0].record()
        f()
        marks[1].record()
    torch.cuda.synchronize()
    repeats = max(5, min(50, int(budget * 1e3 / marks[0].elapsed_time(marks[1]))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        f()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
    return times[repeats // 2]


def peak_bytes(f: Callable[[], object]) -> int:
    """Peak memory of f beyond what is already allocated."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def gemm() -> Row:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Row(
        name="gemm",
        n=8192,
        causal=False,
        dtype="bfloat16",
        value=2 * 8192**3 / seconds(lambda: a @ b) / 1e12,
        unit="TFLOP/s",
    )


def problem(n: int, head: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k, v; dq, dk, dv; g. q includes the scale of the scores."""

    def draw(size: float) -> Tensor:
        return (torch.randn(1, WIDTH // head, n, head, device="cuda") * size).to(dtype)

    point = [draw(1 / math.sqrt(head)), draw(1), draw(1)]
    return point, [draw(1e-3 / math.sqrt(head)), draw(1e-3), draw(1e-3)], draw(1e-3)


def operations(n: int, causal: bool) -> float:
    return 10 * n * (n + 1) / 2 * WIDTH if causal else 10 * n * n * WIDTH


def fused(n: int, head: int, causal: bool, dtype: torch.dtype, ceiling: float) -> list[Row]:
    """Tangent, and tangent with cotangent, as a solver alternates them."""
    point, (dq, dk, dv), g = problem(n, head, dtype)
    q, k, v = point
    pattern = Pattern(causal=causal)
    o, lse = triton_forward.forward(q, k, v, pattern)
    library = backend.torchs_backward(q, k, v, pattern)
    back = partial(backend.torchs_vjp, library) if library else triton_backward.vjp
    t = seconds(lambda: triton_forward.jvp(q, k, v, o, lse, (dq, dk, dv), pattern))
    u = seconds(lambda: back(q, k, v, o, lse, g, pattern))
    rows = []
    for name, rate in (("tangent", 1 / t), ("pair", 2 / (t + u))):
        value = operations(n, causal) * rate / 1e12
        goal = (
            GOALS.get((name, causal)) if (n, head, dtype) == (131072, 64, torch.bfloat16) else None
        )
        target = None if goal is None else goal * ceiling
        met = None if target is None else value >= target
        rows.append(
            Row(
                name=name,
                n=n,
                causal=causal,
                dtype=str(dtype)[6:],
                value=value,
                unit="TFLOP/s",
                residual=None,
                target=target,
                met=met,
            )
        )
    return rows


def eager(n: int, head: int) -> list[Row]:
    """Time and memory of torch.func.jvp on softmax(q k') v relative to the fused tangent."""
    point, tangent, _ = problem(n, head, torch.float32)
    reference, far = seconds_and_bytes(lambda: torch.func.jvp(dense, tuple(point), tuple(tangent)))
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, dq, dk, dv = (x.to(dtype) for x in (*point, *tangent))
        o, lse = triton_forward.forward(q, k, v, Pattern())
        fused = partial(triton_forward.jvp, q, k, v, o, lse, (dq, dk, dv), Pattern())
        mine, near = seconds_and_bytes(fused)
        slower, larger, kind = reference / mine, far / near, str(dtype)[6:]
        goal = 25.0 if dtype == torch.bfloat16 else None
        met = None if goal is None else slower >= goal
        rows.append(
            Row(
                name="eager",
                n=n,
                causal=False,
                dtype=kind,
                value=slower,
                unit="times as slow",
                residual=None,
                target=goal,
                met=met,
            )
        )
        rows.append(
            Row(
                name="eager",
                n=n,
                causal=False,
                dtype=kind,
                value=larger,
                unit="times the memory",
                residual=None,
                target=10.0,
                met=larger >= 10,
            )
        )
    return rows


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, dim=-1) @ v


def seconds_and_bytes(f: Callable[[], object]) -> tuple[float, int]:
    return seconds(f), peak_bytes(f)


def accuracy(n: int, head: int, causal: bool, dtype: torch.dtype) -> list[Row]:
    """Errors of tangent and cotangent in q relative to float64, on 64 adjacent rows per head.

    In causal order these are the last ones: they read everything.
    """
    point, (dq, dk, dv), g = problem(n, head, dtype)
    q, k, v = point
    pattern, rows = Pattern(causal=causal), slice(max(0, n - 64), n)
    o, lse = triton_forward.forward(q, k, v, pattern)
    library = backend.torchs_backward(q, k, v, pattern)
    back = partial(backend.torchs_vjp, library) if library else triton_backward.vjp
    do = triton_forward.jvp(q, k, v, o, lse, (dq, dk, dv), pattern)[:, :, rows].double()
    gq = back(q, k, v, o, lse, g, pattern)[0][:, :, rows].double()
    part = replace(pattern, shift=rows.start)
    q, dq, g, k, v, dk, dv = (
        x.double() for x in (q[:, :, rows], dq[:, :, rows], g[:, :, rows], k, v, dk, dv)
    )
    _, lse = tiled.forward(q, k, v, part)
    found = []
    truths = tiled.jvp(q, k, v, lse, (dq, dk, dv), part), tiled.vjp(q, k, v, lse, g, part)[0]
    for name, mine, truth in zip(
        ("tangent_error", "cotangent_error"), (do, gq), truths, strict=True
    ):
        error = ((mine - truth).norm() / truth.norm()).item()
        target = None if name != "tangent_error" else 5e-3 if dtype == torch.bfloat16 else 1e-6
        met = None if target is None else error <= target
        found.append(
            Row(
                name=name,
                n=n,
                causal=causal,
                dtype=str(dtype)[6:],
                value=error,
                unit="relative",
                residual=None,
                target=target,
                met=met,
            )
        )
    return found


def show(row: Row) -> Row:
    verdict = (
        "" if row.met is None else f"   target {row.target:.3g}: {'met' if row.met else 'MISSED'}"
    )
    causal = "causal" if row.causal else ""
    print(
        f"{row.name:14} {row.n:8} {causal:7} {row.dtype:9} {row.value:10.4g} {row.unit}{verdict}",
        flush=True,
    )
    return row


def measure(lengths: list[int], head: int) -> list[Row]:
    """All rows, each printed as soon as it is measured."""
    rows = [show(gemm())]
    for n in lengths:
        for dtype in (torch.bfloat16, torch.float32):
            rows += [
                show(r) for c in (False, True) for r in fused(n, head, c, dtype, rows[0].value)
            ]
            rows += [show(r) for c in (False, True) for r in accuracy(n - 1, head, c, dtype)]
    if 16384 in lengths:
        rows += [show(r) for r in eager(16384, head)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 16384, 65536, 131072])
    parser.add_argument("--head", type=int, default=64, help="head dimension; heads x head = 768")
    options = parser.parse_args()
    measure(options.n, options.head)


if __name__ == "__main__":
    main()
