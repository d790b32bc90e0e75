"""The command `simulate`: attention as a flow of particles through depth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lipscope.cli import options as opt
from lipscope.cli.terminal import progress, show_json, show_table


class SimulateCommand(TyperCommand):
    """Appends the table of presets to the help text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lipscope.dynamics.simulation import PRESETS

        super().format_help(ctx, formatter)
        typer.echo(" Presets\n")
        for name, preset in PRESETS.items():
            typer.echo(
                f"   {name:<10} {preset.about}\n"
                f"{'':<14}n = {preset.n}, d = {preset.dim}, t = {preset.time:g}"
            )


def simulate(
    preset: Annotated[str, opt.option("Flow to simulate; listed below.")] = "clusters",
    n: Annotated[int | None, opt.option("Number of tokens.", "the preset's", name="--n")] = None,
    dim: Annotated[int | None, opt.option("Dimension of a token.", "the preset's")] = None,
    time: Annotated[float | None, opt.option("Depth to integrate to.", "the preset's")] = None,
    device: Annotated[str, opt.option("For example cpu, cuda or cuda:1.")] = "cpu",
    seed: Annotated[int, opt.option("Seed of the initial tokens.")] = 0,
    out: Annotated[
        Path | None, opt.option("Directory to write to.", "simulation-PRESET", metavar="DIR")
    ] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Simulate tokens flowing through infinitely many layers; write a figure and its numbers."""
    with progress("simulating", quiet) as report:
        from lipscope.dynamics.simulation import simulate as run
        from lipscope.report.simulations import check_simulation_folder, write_simulation

        folder = out or Path(f"simulation-{preset}")
        # Before the simulation: minutes of work should not end in a directory error.
        check_simulation_folder(folder)
        found = run(preset, n=n, dim=dim, time=time, device=device, seed=seed, progress=report)
        paths = write_simulation(found, folder)
    if as_json:
        from lipscope.report.simulations import numbers_of

        show_json(numbers_of(found))
    else:
        from rich.table import Table

        from lipscope.report.simulations import summary

        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        files = ", ".join(path.name for path in paths)
        for line in (*summary(found), ("in", str(folder)), ("files", files)):
            table.add_row(*line)
        show_table(table, quiet)
