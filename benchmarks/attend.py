"""`attend` at training sizes on one GPU beside torch's own; writes results/attend_<device>.json.

    python -m benchmarks.attend                # times, memory, errors
    python -m benchmarks.attend --long         # 65,536 tokens backward through the tangent as well
    python -m benchmarks.attend --page         # the tables of docs/attend.md from stored figures

bfloat16, no causal mask. "math" is attention written out with torch.softmax. Milliseconds are
medians; they include the work of the host, which at 1,024 tokens is most of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention as flash

from lipscope.fused.primitive import attend

RESULTS = Path(__file__).parent / "results"
SHAPES = ((8, 16, 1024, 64), (2, 16, 4096, 64), (1, 16, 16384, 64))
TARGETS = {1024: 0.7, 4096: 1.6, 16384: 7.0}
"""Milliseconds for value and tangent."""


def milliseconds(f: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call, each measured alone, after a warm-up."""
    for _ in range(3):
        f()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def rates(calls: dict[str, Callable[[], object]]) -> dict[str, float | None]:
    """Milliseconds per call when calls follow each other, as in training; None without memory.

    The median of five rounds, in each of which all are measured in turn: the host's share varies
    from one second to the next, and is then the same for what is compared.
    """
    first = {name: attempt(lambda f: _elapsed(f, 3), f) for name, f in calls.items()}
    repeats = {name: min(100, 1 + int(100 / t)) for name, t in first.items() if t is not None}
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(5):
        for name, count in repeats.items():
            times[name].append(_elapsed(calls[name], count))
    return {name: statistics.median(times[name]) if name in times else None for name in calls}


def _elapsed(f: Callable[[], object], repeats: int) -> float:
    """Milliseconds per call, after three that are not counted."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        f()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats


def gibibytes(f: Callable[[], object]) -> float:
    """Peak memory of a call beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def attempt(
    measure: Callable[[Callable[[], object]], float], f: Callable[[], object]
) -> float | None:
    """A figure, or None where the device has too little memory."""
    try:
        return measure(f)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    t = q @ k.mT / q.shape[-1] ** 0.5
    return torch.softmax(t if mask is None else t.masked_fill(~mask, -torch.inf), -1) @ v


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`math` without torch.softmax, whose forward mode cannot be differentiated everywhere."""
    t = q @ k.mT / q.shape[-1] ** 0.5
    e = torch.exp(t - t.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True) @ v


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 7) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype) for _ in range(count)]


def forward_mode(f: Callable[..., Tensor], x: list[Tensor], d: list[Tensor]) -> object:
    return torch.func.jvp(f, tuple(x), tuple(d))


def dual_numbers(f: Callable[..., Tensor], x: list[Tensor], d: list[Tensor]) -> object:
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(*pair) for pair in zip(x, d, strict=True))
        return forward_ad.unpack_dual(f(*duals))


def through_the_tangent(
    f: Callable[..., Tensor], x: list[Tensor], d: list[Tensor], g: Tensor
) -> object:
    point = [t.detach().requires_grad_() for t in x]
    _, moved = torch.func.jvp(f, tuple(point), tuple(d))
    return torch.autograd.grad(moved, point, g)


def band(n: int, block: int = 128) -> tuple[Tensor, float]:
    """A block-sparse mask, a band of whole blocks, and its share of non-empty ones."""
    i = torch.arange(n // block, device="cuda")
    blocks = (i[:, None] - i[None]).abs() <= max(1, n // block // 16)
    mask = blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return mask[None, None], blocks.float().mean().item()


def row(shape: tuple[int, int, int, int]) -> dict[str, object]:
    """All figures of one shape."""
    *x, dq, dk, dv, g = draw(*shape)
    d, n = [dq, dk, dv], shape[2]
    tiny = draw(1, 1, 8, 8, count=6)  # what forward mode costs the host whatever is computed
    with torch.no_grad():
        dense = torch.rand(1, 1, n, n, device="cuda") < 0.5
        sparse, share = band(n)
        calls: dict[str, Callable[[], object]] = {
            "forward, flash": lambda: flash(*x),
            "forward, attend": lambda: attend(*x),
            "value + tangent, attend": lambda: forward_mode(attend, x, d),
            "value + tangent, attend, dual numbers": lambda: dual_numbers(attend, x, d),
            "torch.func.jvp of one multiplication": lambda: forward_mode(
                lambda q, k, v: q * 2.0, tiny[:3], tiny[3:]
            ),
            "value + tangent, math": lambda: forward_mode(math, x, d),
            "boolean mask, attend": lambda: forward_mode(lambda *t: attend(*t, mask=dense), x, d),
            "boolean mask, math": lambda: forward_mode(lambda *t: math(*t, mask=dense), x, d),
            "block-sparse mask, attend": lambda: forward_mode(
                lambda *t: attend(*t, mask=sparse), x, d
            ),
        }
        figures = {"shape": shape, **rates(calls), "share of non-empty tiles": share}
        figures["value + tangent, attend, one call alone"] = milliseconds(
            lambda: forward_mode(attend, x, d)
        )
    second = {
        "attend": lambda: through_the_tangent(attend, x, d, g),
        "math": lambda: through_the_tangent(written_out, x, d, g),
    }
    timed = rates(second)
    for name, f in second.items():
        figures[f"backward through the tangent, {name}"] = timed[name]
        figures[f"backward through the tangent, {name}, GiB"] = attempt(gibibytes, f)
    return figures


def long(n: int) -> dict[str, object]:
    """Backward through the tangent where an n x n matrix does not fit."""
    *x, dq, dk, dv, g = draw(1, 16, n, 64)

    def second() -> object:
        return through_the_tangent(attend, x, [dq, dk, dv], g)

    name = "backward through the tangent, attend"
    return {"shape": (1, 16, n, 64), **rates({name: second}), f"{name}, GiB": gibibytes(second)}


def errors() -> dict[str, dict[str, float]]:
    """Relative errors against float64, by dtype, over masks, grouped heads and uneven lengths."""
    table: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, d = draw(2, 4, 333, 64, dtype=dtype)[:3], draw(2, 4, 333, 64, dtype=dtype)[3:6]
        found = []
        for exact in (False, True):
            point, moved = (
                [(t.double() if exact else t).clone().requires_grad_() for t in side]
                for side in (x, d)
            )
            o, do = torch.func.jvp(written_out if exact else attend, tuple(point), tuple(moved))
            back = torch.autograd.grad(o.double().sin().sum(), point, retain_graph=True)
            through = torch.autograd.grad(do.double().sin().sum(), [*point, *moved])
            found.append([o, do, *back, *through])
        names = ("value", "tangent", *("gradient",) * 3, *("through the tangent",) * 6)
        worst: dict[str, float] = {}
        for name, mine, truth in zip(names, *found, strict=True):
            error = ((mine.double() - truth.double()).norm() / truth.double().norm()).item()
            worst[name] = max(worst.get(name, 0.0), error)
        table[str(dtype).removeprefix("torch.")] = worst
    return table


def table(result: dict[str, Any]) -> str:
    """The figures as docs/attend.md shows them."""
    lines = [
        "| B, heads, n, d | forward: flash / attend | value + tangent: attend / math | "
        "with a boolean mask: attend / math | block-sparse mask (share): attend | "
        "backward through the tangent: attend / math | its memory, GiB: attend / math |",
        "|---|---|---|---|---|---|---|",
    ]
    pairs = (
        ("forward, flash", "forward, attend"),
        ("value + tangent, attend", "value + tangent, math"),
        ("boolean mask, attend", "boolean mask, math"),
        ("block-sparse mask, attend",),
        ("backward through the tangent, attend", "backward through the tangent, math"),
        ("backward through the tangent, attend, GiB", "backward through the tangent, math, GiB"),
    )
    for figures in result["rows"]:
        cells = [", ".join(str(size) for size in figures["shape"])]
        for pair in pairs:
            found = [figures.get(name) for name in pair]
            cell = " / ".join("-" if x is None else f"{x:.3g}" for x in found)
            if pair[0].startswith("block") and found[0] is not None:
                cell += f" ({figures['share of non-empty tiles']:.2f})"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def error_table(result: dict[str, Any]) -> str:
    """The errors as docs/attend.md shows them."""
    columns = ("value", "tangent", "gradient", "through the tangent")
    lines = ["| dtype | " + " | ".join(columns) + " |", "|---|---|---|---|---|"]
    for dtype, worst in result["errors"].items():
        lines.append(f"| {dtype} | " + " | ".join(f"{worst[c]:.1e}" for c in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="print the tables of docs/attend.md")
    parser.add_argument("--long", action="store_true", help="65,536 tokens as well")
    options = parser.parse_args()
    if options.page:
        result = json.loads((RESULTS / "attend_h200.json").read_text())
        print(table(result), error_table(result), sep="\n\n")
        return
    device = torch.cuda.get_device_name()
    name = "h200" if "H200" in device else device.lower().replace(" ", "_")
    result: dict[str, Any] = {"device": device, "torch": torch.__version__}
    rows = []
    for shape in SHAPES:
        figures = row(shape)
        rows.append(figures)
        print(f"\n{shape}, target of value + tangent {TARGETS[shape[2]]} ms")
        for key, value in figures.items():
            if isinstance(value, float) or value is None:
                print(f"  {key:45s} {'out of memory' if value is None else f'{value:9.3f}'}")
    if options.long:
        rows.append(long(65536))
        print("\n", rows[-1])
    result["rows"], result["errors"] = rows, errors()
    print(json.dumps(result["errors"], indent=1))
    path = RESULTS / f"attend_{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
