"""Tightness of the bound of L2 attention for D = H = 1: best found, closed form, bound; N <= 1000.

python benchmarks/l2_tightness.py [PNG]             # for instance docs/gallery/l2_tightness.png
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

import lipscope as ls

LENGTHS = [
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    13,
    17,
    23,
    31,
    42,
    56,
    75,
    101,
    135,
    181,
    243,
    325,
    435,
    583,
    781,
    1000,
]


def unit_layer() -> ls.nn.L2SelfAttention:
    """Set every weight so that W_Q = W_V = W_O = 1."""
    layer = ls.nn.L2SelfAttention(1, 1).double()
    for part, weight in ((layer.query, 1.0), (layer.value, 1 / 3), (layer.out, 1.0)):
        torch.nn.init.constant_(part.weight, weight)
    return layer


def row_sum(y: Tensor) -> Tensor:
    """sum_j |J_0j| for a token at 0 among tokens at y [starts, N - 1]."""
    P = torch.cat([torch.zeros_like(y[:, :1]), -y.square()], dim=1).softmax(dim=1)[:, 1:]
    mean = (P * y).sum(dim=1, keepdim=True)
    covariance = (P * y.square()).sum(dim=1) - mean[:, 0].square()
    own = 1 - P.sum(dim=1) + 2 * covariance
    return own + (P * (1 - 2 * y * (y - mean)).abs()).sum(dim=1)


def climbed(N: int, phi: float) -> Tensor:
    """The best of many ascents: from two clusters of all proportions, and from noise."""
    g = torch.Generator().manual_seed(N)
    share = torch.rand(24, 1, generator=g, dtype=torch.float64)
    side = torch.where(torch.rand(24, N - 1, generator=g, dtype=torch.float64) < share, 1.0, -1.0)
    alternating = 1.0 - 2.0 * (torch.arange(N - 1) % 2).double().expand(8, -1)
    sizes = math.sqrt(1 + phi) * (
        1 + 0.1 * torch.randn(32, N - 1, generator=g, dtype=torch.float64)
    )
    noise = 1.5 * torch.randn(8, N - 1, generator=g, dtype=torch.float64)
    y = torch.cat([sizes * torch.cat([side, alternating]), noise]).requires_grad_(True)
    optimiser = torch.optim.Adam([y], lr=0.03)
    best, where = torch.zeros(len(y), dtype=torch.float64), y.detach().clone()
    for step in range(600):
        value = row_sum(y)
        better = value > best
        best, where = (
            torch.where(better, value, best).detach(),
            torch.where(better[:, None], y, where).detach(),
        )
        optimiser.param_groups[0]["lr"] = 0.03 * (1 - step / 600)
        optimiser.zero_grad()
        (-value.sum()).backward()
        optimiser.step()
    return torch.cat([torch.zeros(1, dtype=torch.float64), where[best.argmax()]])[:, None]


def rows() -> list[tuple[int, float, float, float]]:
    """(N, best found, closed form, bound); the closed form is attained for odd N."""
    layer, found = unit_layer(), []
    for N in LENGTHS:
        bound = layer.lipschitz_bound(N, math.inf)
        phi = (bound - 1) / 4
        first = torch.zeros(N, 1, dtype=torch.float64)
        first[0] = 1
        best = (
            ls.jacobian(layer.as_map(N), climbed(N, phi)).rmv(first).abs().sum().item()
        )  # a row of the layer's own J
        found.append((N, best, 4 * phi + (1 - phi) / (1 + phi), bound))
    return found


def draw(table: list[tuple[int, float, float, float]], path: str) -> None:
    from matplotlib.figure import Figure

    N, best, closed, bound = zip(*table, strict=True)
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(N, bound, color="black", label="bound, $4x + 1$")
    axes.plot(
        N,
        closed,
        color="tab:blue",
        label=r"closed form, $4x + \frac{1-x}{1+x}$ (attained for odd $N$)",
    )
    axes.plot(N, best, "o", color="tab:orange", markersize=4, label="best found by ascent")
    axes.set_xscale("log")
    axes.set_xlabel("number of tokens $N$")
    axes.set_ylabel(r"Lipschitz constant, norm $\infty$")
    axes.set_title("L2 attention, $D = H = 1$: $x e^{x+1} = N - 1$")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    table = rows()
    print(f"{'N':>5} {'best found':>11} {'closed form':>12} {'bound':>8} {'found/bound':>12}")
    for N, best, closed, bound in table:
        print(f"{N:>5} {best:>11.4f} {closed:>12.4f} {bound:>8.4f} {best / bound:>12.3f}")
        assert best <= bound
    if len(sys.argv) > 1:
        draw(table, sys.argv[1])


if __name__ == "__main__":
    main()
