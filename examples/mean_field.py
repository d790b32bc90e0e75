"""Attention on measures in four pictures and a table: python examples/mean_field.py FOLDER

transition.png       from n tokens to a measure: sigma(n) reaches a plateau at n = exp(2 gamma R^2)
two_diracs.png       the two-Dirac measures between the proved lower bound and both upper bounds
masked.png           why the bound for unmasked attention fails in d_p, and the one that holds
splitting_map.png    where two tokens on the line split
splitting_table.md   which maps split, and by how much
"""

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window is needed
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from rich.progress import track

import lipscope as ls
from lipscope.mean_field.duplication import MapGain, splitting_map, splitting_table
from lipscope.report import mean_field_figures as figures


def line(A: float, causal: bool = False) -> ls.SelfAttention:
    """Attention on tokens of size 1 with scores A x_i x_j and V = 1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return ls.SelfAttention(A * one, one, one, causal=causal)


def transition() -> Figure:
    figure, ax = plt.subplots(figsize=(7, 4.6), layout="constrained")
    figures.draw_transitions(
        [
            ls.mean_field.transition(line(-1.0), R, 1e30, per_decade=8)
            for R in (1.0, 2.0, 3.0, 4.0, 5.0)
        ],
        ax,
    )
    ax.set_title("A = -1, V = 1: one token at R, a crowd at -R")
    return figure


def two_diracs() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    radii = [0.1 * i for i in range(1, 41)]
    figures.draw_two_diracs(line(-1.0), radii, left).set_title("A = -1: atoms at R and -R, γ = 1")
    figures.draw_two_diracs(line(1.0), radii, right).set_title("A = 1: atoms at R and R/2, γ = 1/8")
    return figure


def masked() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    counts = [round(10 ** (i / 4)) for i in range(21)]
    figures.draw_averaging((1, 1.25, 1.5, 2, 4, math.inf), counts, left).set_title(
        "A = 0: causal attention is averaging"
    )
    tokens = torch.tensor([1.0] + [-1.0] * 399, dtype=torch.float64)[:, None]
    radii = [0.05 * i for i in range(1, 25)]
    figures.draw_masked_bounds(line(-1.0, causal=True), radii, tokens, right)
    right.set_title("A = -1: tokens R, -R, -R, -R, ...")
    return figure


def maps() -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    at = torch.linspace(-6, 6, 241, dtype=torch.float64)
    for ax, causal in zip(axes, (False, True), strict=True):
        figures.draw_splitting_map(splitting_map(line(-1.0, causal), at), ax)
        ax.set_title(
            "A = -1, V = 1, masked: token 1 comes first"
            if causal
            else "A = -1, V = 1, without mask"
        )
    return figure


def table(two: list[MapGain], three: list[MapGain]) -> str:
    """Largest gains found in the plane, V = I, radius 16, two and three tokens, any weights."""
    lines = [
        "| map | 2 tokens, equal weights | 2, free weights | 3, equal | 3, free |",
        "|---|---|---|---|---|",
    ]
    for few, more in zip(two, three, strict=True):
        gains = (few.equal, few.free, more.equal, more.free)
        lines.append(" | ".join([f"| {few.name}", *(f"{gain:.4f}" for gain in gains)]) + " |")
    return "\n".join(lines) + "\n"


PICTURES = {
    "transition": transition,
    "two_diracs": two_diracs,
    "masked": masked,
    "splitting_map": maps,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in track([*PICTURES, "2 tokens", "3 tokens"], description="drawing"):
        if name in PICTURES:
            PICTURES[name]().savefig(folder / f"{name}.png", dpi=110)
        else:
            rows.append(splitting_table(int(name[0])))
    (folder / "splitting_table.md").write_text(table(*rows), encoding="utf-8")
    print(f"in {folder}: {', '.join(f'{name}.png' for name in PICTURES)}, splitting_table.md")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/mean_field.py FOLDER")
    main(Path(sys.argv[1]))
