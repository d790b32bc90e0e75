"""Bounds of L2 attention with identity weights, and how close ascent comes to them.

python -m benchmarks.l2_bounds                      # the table of docs/theory/bounds.md, a second
python -m benchmarks.l2_bounds --ascend             # the largest constant found, five minutes
python -m benchmarks.l2_bounds --tightness PNG      # for instance docs/gallery/l2_tightness.png
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import Tensor

import lipscope as ls
from lipscope.theorems.kim2021 import phi_inverse
from lipscope.theorems.sharper import distance_reaction
from lipscope.theorems.statement import visibility

LENGTHS, SIZES = (8, 32, 128, 1024, 131_072), (1, 4, 8, 16, 32)
FOUND_LENGTHS, FOUND_SIZES = (2, 8, 32, 128, 512), (1, 2, 4, 8, 16, 64)

MANY = 1 << 20
"""A head size beyond which it plays no part."""


def attention(k: int, causal: bool) -> ls.SelfAttention:
    """L2 attention whose queries, keys and values are the tokens, with scores -|x_i - x_j|^2."""
    one = torch.eye(k, dtype=torch.float64)
    return ls.SelfAttention(one, one, one, kernel=ls.L2(scale=1.0), causal=causal)


def promised(n: int, k: int, causal: bool) -> float:
    """The bound for n tokens and heads of size k; scale and weights of size one."""
    return distance_reaction(visibility(attention(1, causal), n), k)


def table() -> str:
    """The bounds as a table: rows are lengths, columns head sizes."""
    names = ("Kim et al.", "plain", *(f"k = {k}" for k in SIZES), "any k", "causal", "2φ")
    lines = ["| n | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for n in LENGTHS:
        phi, N = phi_inverse(n), n - 1
        kim = math.sqrt(n) * (4 * phi + 1)
        plain = math.sqrt(1 + N / 2) + 2 * phi + 2 * math.sqrt(phi_inverse(2) * N * phi)
        full = [promised(n, k, False) for k in (*SIZES, MANY)]
        numbers = (kim, plain, *full, promised(n, MANY, True), 2 * phi)
        lines.append(f"| {n} | " + " | ".join(f"{x:.4g}" for x in numbers) + " |")
    return "\n".join(lines)


def starts(n: int, k: int) -> list[Tensor]:
    """Inputs near which the constant is large, slightly moved so that ascent can leave symmetry."""
    g = torch.Generator().manual_seed(n + k)
    phi = phi_inverse(n)
    # One token among the others at the distance of the largest mean distance, left and right.
    line = torch.zeros(n, k, dtype=torch.float64)
    line[1:, 0] = math.sqrt(1 + phi) * (1 - 2 * (torch.arange(n - 1) % 2).double())
    # A few tokens at one point and the others far from each other, around it.
    crowd = torch.randn(n, k, generator=g, dtype=torch.float64)
    crowd *= math.sqrt(math.log(n + 1) / 2) / crowd.norm(dim=1, keepdim=True)
    crowd[: max(1, math.isqrt(n) // 2)] = 0
    cloud = torch.randn(n, k, generator=g, dtype=torch.float64) / math.sqrt(2)
    noise = 1e-3 * torch.randn(n, k, generator=g, dtype=torch.float64)
    # Backwards as well: under a causal mask only the last token sees all others.
    return [line + noise, line.flip(0) + noise, crowd + noise, crowd.flip(0) + noise, cloud]


def largest_found(n: int, k: int, causal: bool, steps: int) -> float:
    """The largest constant that gradient ascent finds, measured again from a fresh start."""
    R = 4 * math.sqrt(1 + phi_inverse(n))
    climb = ls.attack.Climb(steps=steps, restarts=2)
    found = ls.attack.ascend(attention(k, causal), ls.Ball(R, n), climb, starts=starts(n, k))
    return found.value


def ascend(steps: int = 60) -> None:
    worst = 0.0
    print("|  n |  k | mask | found | bound | found / bound |\n|---|---|---|---|---|---|")
    for n in FOUND_LENGTHS:
        for k in FOUND_SIZES:
            for causal in (False, True):
                found, bound = largest_found(n, k, causal, steps), promised(n, k, causal)
                worst = max(worst, found / bound)
                mask = "causal" if causal else "none"
                print(f"| {n} | {k} | {mask} | {found:.3f} | {bound:.3f} | {found / bound:.3f} |")
                sys.stdout.flush()
                assert found <= bound
    print(f"\nlargest found / bound: {worst:.3f}")


def draw_tightness(path: str) -> None:
    """Norm inf, one coordinate: claim K1 of `lipscope reproduce` as a figure."""
    from matplotlib.figure import Figure

    from lipscope.papers.kim_bounds import plot_tightness, run_tightness
    from lipscope.papers.setting import Setting

    picture = plot_tightness(run_tightness(Setting()))
    figure = Figure(figsize=(7, 4.3), layout="constrained")
    axes = figure.subplots()
    # The points lie on each other: rings around crosses around dots.
    styles = {"bound": "k--", "closed form": "k-", "best": "o", "fifth": "x", "start": "."}
    for line in picture.lines:
        (style,) = (styles[name] for name in styles if line.name.startswith(name))
        axes.semilogx(line.x, line.y, style, markersize=8 - len(axes.lines), mfc="none", lw=1.2)
        axes.lines[-1].set_label(line.name)
    axes.set(title=picture.title, xlabel=picture.x, ylabel=picture.y)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    if "--tightness" in sys.argv[1:]:
        draw_tightness(sys.argv[-1])
        return
    print(table())
    if "--ascend" in sys.argv[1:]:
        ascend()
        print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
