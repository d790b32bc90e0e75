"""Training curves, loss and constant of every layer: figures, CSV and table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lipscope._files import whole_file
from lipscope.report import charts
from lipscope.report.figures import constants_by_step
from lipscope.report.palette import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from lipscope.papers.charlm.training import CurvePoint

CSV = "curves.csv"
PNG = "curves.png"


def write_curves(curve: Sequence[CurvePoint], directory: Path, unigram_loss: float) -> None:
    """Write curves.csv and curves.png to the directory."""
    with whole_file(directory / CSV) as draft:
        draft.write_bytes(curves_csv(curve).encode())
    with whole_file(directory / PNG) as draft:
        draw_curves(curve, unigram_loss).savefig(draft, dpi=120)


def curves_csv(curve: Sequence[CurvePoint]) -> str:
    """One row per evaluation: step, both losses in nats per character, sigma of each layer."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    layers = range(len(curve[0].constants))
    writer.writerow(["step", "training_loss", "test_loss", *(f"sigma_layer_{i}" for i in layers)])
    for r in curve:
        losses = ("" if math.isnan(x) else repr(x) for x in (r.learned, r.test))
        writer.writerow([r.step, *losses, *map(repr, r.constants)])
    return out.getvalue()


def draw_curves(curve: Sequence[CurvePoint], unigram_loss: float) -> Figure:
    """Losses on the left, constants on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ax in (left, right):
        charts.style(ax, 10)
    steps = [r.step for r in curve]
    # The first evaluation comes before any step, and has no training loss.
    left.plot(steps[1:], [r.learned for r in curve[1:]], ":", label="training", color=colour("s1"))
    left.plot(steps, [r.test for r in curve], label="test", color=colour("s0"))
    left.axhline(unigram_loss, color=colour("muted"), linestyle="--", label="unigram baseline")
    left.set(xlabel="step", ylabel="loss (nats per character)")
    left.legend()
    found = {
        f"layer {i}": (steps, [r.constants[i] for r in curve])
        for i in range(len(curve[0].constants))
    }
    constants_by_step(right, found)
    right.set_ylabel("local Lipschitz constant of attention")
    return figure


def curve_table(curve: Sequence[CurvePoint], unigram_loss: float) -> Table:
    """One row per evaluation, at most twelve, always including the last."""
    from rich.table import Table

    table = Table(
        caption=f"losses in nats per character; the unigram baseline is {unigram_loss:.3f}"
    )
    for name in (
        "step",
        "training loss",
        "test loss",
        "sigma, smallest layer",
        "sigma, largest layer",
    ):
        table.add_column(name, justify="right")
    # A training of any length fits a screen.
    every = math.ceil(len(curve) / 12)
    # Backwards from the last evaluation, so that it is always among those shown.
    for r in curve[len(curve) - 1 :: -every][::-1]:
        learned = "" if math.isnan(r.learned) else f"{r.learned:.3f}"
        table.add_row(
            str(r.step),
            learned,
            f"{r.test:.3f}",
            f"{min(r.constants):.3g}",
            f"{max(r.constants):.3g}",
        )
    return table
