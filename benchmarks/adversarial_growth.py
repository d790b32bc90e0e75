"""sigma(n) of one attention layer: text, swapped tokens, ascent, constructions, and theorems.

python benchmarks/adversarial_growth.py [--text FILE] [--layer 3] [--figure FILE.png]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lipscope as ls
from lipscope.attack.constructions import SPREAD
from lipscope.attack.tokens import guided_swaps
from lipscope.probes.bounds import for_one_sequence
from lipscope.probes.token_target import layer_sigma
from lipscope.report.palette import colour, marker, series
from lipscope.study.growth import fit
from lipscope.study.reading import read

REAL, TOKENS, NEAR, BALL = (
    "real text",
    "3 tokens replaced",
    "ascent within 0.1 R of the text",
    "ascent in the ball",
)
CROWD, ZERO = "one token against a crowd (Castin et al.)", "one token at zero (Kim et al.)"
COMPACT, CASTIN = "upper bound: compact", "upper bound: Castin et al."
CLIMB, NEAR_RADIUS = ls.attack.Climb(steps=20, restarts=1), 0.1
"""The ascent of `lipscope attack`, and the radius around the text relative to its longest token."""

TOKENS_UP_TO = 64
"""Beyond this length the token search takes minutes."""


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    models = ls.load(), ls.load(dtype="float32")
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for n in track(options.lengths, console=Console(stderr=True), transient=True):
        for name, value in at_length(models, options.text, options.layer, n).items():
            curves[name][n] = value
    show(curves, options.lengths)
    if options.figure is not None:
        title = f"MiniLM, layer {options.layer}: attention with its output projection"
        growth_figure(curves, title).savefig(options.figure, dpi=150)


def at_length(
    models: tuple[ls.Model, ls.Model], text: Path | None, layer: int, n: int
) -> dict[str, float]:
    """All numbers of one length, in float64; the ball's radius is that of the longest token."""
    exact, quick = models
    ids = read(exact, text, lengths=(n,)).batch(n, (0,))[0]
    f, X = site(exact, ids, layer)
    ball = ls.Ball(X.norm(dim=1).max().item() * (1 + 1e-12), n)
    upper = {row.name: row.value for row in ls.bounds(f, ball) if row.kind == "upper"}
    found = {REAL: sigma(f, X)}
    if n <= TOKENS_UP_TO:
        swapped = guided_swaps(layer_sigma(quick, layer), ids.tolist(), 3, width=16)
        found[TOKENS] = sigma(*site(exact, torch.tensor(swapped.ids), layer))
    found[NEAR] = ls.attack.ascend(f, ls.Around(X, NEAR_RADIUS * ball.R), CLIMB).value
    built = ls.attack.explicit_inputs(f, ball)
    found[CROWD] = max(one.value for one in built if not one.name.startswith(SPREAD))
    found[ZERO] = max(one.value for one in built if one.name.startswith(SPREAD))
    found[BALL] = ls.attack.ascend(f, ball, CLIMB, starts=[X]).value
    return found | {COMPACT: upper["compact"], CASTIN: upper["Castin et al., ball"]}


def site(model: ls.Model, ids: torch.Tensor, layer: int) -> tuple[ls.SelfAttention, torch.Tensor]:
    (found,) = model.sites(ids[None], scopes=("attention",), layers=[layer])
    return for_one_sequence(found.f).double(), found.X[0].double()


def sigma(f: ls.SelfAttention, X: torch.Tensor) -> float:
    return float(ls.local_lipschitz(f, X).value)


def show(curves: dict[str, dict[int, float]], lengths: list[int]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("sigma", *map(str, lengths), "exponent"):
        table.add_column(name)
    for name, curve in curves.items():
        slope = f"{fit('attention', 0, list(curve.items())).alpha:.2f}" if len(curve) > 2 else "-"
        table.add_row(name, *(f"{curve[n]:.4g}" if n in curve else "-" for n in lengths), slope)
    Console(width=120).print(table)


def growth_figure(curves: dict[str, dict[int, float]], title: str) -> Figure:
    """sigma against length on log axes, one curve per name."""
    figure, ax = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    lengths = sorted({n for curve in curves.values() for n in curve})
    for i, (name, curve) in enumerate(curves.items()):
        at = sorted(curve)
        ax.plot(
            at,
            [curve[n] for n in at],
            marker(i)[0] + "-",
            markersize=4,
            color=colour(series(i, len(curves))),
            label=name,
        )
    # The guide starts below all curves: its slope matters, not its height.
    lowest = min(min(curve.values()) for curve in curves.values())
    guide = [0.8 * lowest * (n / lengths[0]) ** 0.5 for n in lengths]
    ax.plot(lengths, guide, "--", color=colour("muted"), label="slope 1/2")
    ax.set(xscale="log", yscale="log", xlabel="n, tokens", ylabel="σ, local Lipschitz constant")
    ax.set_title(title)
    ax.set_xticks(lengths, list(map(str, lengths)))
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a text file; by default the embedded prose")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--figure", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
