"""Tables and figures of docs/training.md, from the results of `benchmarks.training_grid`.

python -m benchmarks.training_page              # rewrite the tables and the figures
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.training_figures import NAMES, breaking_plans, draw_breaking, draw_grid
from lipscope.papers.trainings import (
    best_rate,
    by_rate,
    cells_of,
    outcomes,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "training_h200.json"
PAGE, GALLERY = ROOT / "docs" / "training.md", ROOT / "docs" / "gallery"
LONG = ("l2", "dot, l2 values", "l2, dot values")
SHORT = {name: words if name in LONG else name for name, words in NAMES.items()}
NOT_RUN = "not run"


def grid_table(results: dict[str, Any], plan: str) -> str:
    """A row per cell: test loss at its best rate, the outcome of the others, sigma by layer."""
    settings, cells = results["settings"]["plans"][plan], cells_of(results, plan)
    lines = [
        "| attention | depth | parameters | test loss | at rate | other rates | sigma by layer "
        "| seconds |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for variant in settings["variants"]:
        for depth in settings["depths"]:
            cell = cells.get((variant, depth))
            start = f"| {NAMES[variant]} | {depth} |"
            if cell is None:
                lines.append(f"{start} | {NOT_RUN} | | | | |")
                continue
            rate, members = best_rate(cell)
            ends = outcomes(cell, results["settings"]["unigram_loss"])
            others = "; ".join(str(end) for r, end in ends.items() if r != rate)
            sigma = cell["sigma"][str(members[0])]
            lines.append(
                f"{start} {cell['parameters']:,} | {_spread(cell, members)} | {rate:g} | {others} "
                f"| {min(sigma):.2g} to {max(sigma):.2g} | {cell['seconds_training']:.0f} |"
            )
    return "\n".join(lines)


def long_table(results: dict[str, Any]) -> str:
    """Plan "long": the loss on the held-out windows of the curve, and at the end on all."""
    plan, cells = results["settings"]["plans"]["long"], cells_of(results, "long")
    noted = range(plan["every"], plan["steps"] + 1, plan["every"])
    steps = sorted({noted[len(noted) * i // 5 - 1] for i in range(1, 6)})
    lines = [
        "| attention | "
        + " | ".join(f"{step} steps" for step in steps)
        + " | at the end, all windows |"
    ]
    lines += ["|---" * (len(steps) + 2) + "|"]
    for variant in plan["variants"]:
        cell = cells.get((variant, plan["depths"][0]))
        if cell is None:
            lines.append(f"| {NAMES[variant]} |" + f" {NOT_RUN} |" * (len(steps) + 1))
            continue
        at = {point["step"]: mean(point["test"]) for point in cell["curve"]}
        along = " | ".join(f"{at[step]:.3f}" for step in steps)
        lines.append(f"| {NAMES[variant]} | {along} | {_spread(cell, range(len(cell['final'])))} |")
    return "\n".join(lines)


def _spread(cell: dict[str, Any], members: Iterable[int]) -> str:
    losses = [cell["final"][m] for m in members]
    return f"{mean(losses):.3f} ± {stdev(losses):.3f}"


def breaking_table(results: dict[str, Any], plan: str) -> str:
    """For each learning rate: the mean test loss of the successful seeds, and how many failed."""
    settings, cells = results["settings"]["plans"][plan], cells_of(results, plan)
    places = [(variant, depth) for variant in settings["variants"] for depth in settings["depths"]]
    ends = {
        place: outcomes(cell, results["settings"]["unigram_loss"]) for place, cell in cells.items()
    }
    lines = [
        "| learning rate | "
        + " | ".join(f"{SHORT[variant]}, {depth}" for variant, depth in places)
        + " |"
    ]
    lines += ["|---" * (len(places) + 1) + "|"]
    for rate in settings["rates"]:
        entries = [str(ends[place][rate]) if place in ends else NOT_RUN for place in places]
        lines.append(f"| {rate:g} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def largest_rates(results: dict[str, Any]) -> str:
    """For each plan and depth the largest rate at which every seed learned, by variant."""
    lines = []
    for name, plan in breaking_plans(results).items():
        cells = cells_of(results, name)
        for depth in plan["depths"]:
            words = []
            for variant in plan["variants"]:
                if (variant, depth) in cells:
                    ends = outcomes(cells[variant, depth], results["settings"]["unigram_loss"])
                    fine = [rate for rate, end in ends.items() if end.fine]
                    last = " (the largest tried)" if max(plan["rates"]) in fine else ""
                    words.append(f"{SHORT[variant]} {f'{max(fine):g}' if fine else 'none'}{last}")
            lines.append(f"- {name}, depth {depth}: {'; '.join(words) or NOT_RUN}")
    return "\n".join(lines)


def rises_table(results: dict[str, Any]) -> str:
    """Plan "why": the first gradient, when each seed's loss first rose, and its early maximum."""
    plan = results["settings"]["plans"]["why"]
    cells = {variant: cell for (variant, _), cell in cells_of(results, "why").items()}
    lines = ["| | " + " | ".join(SHORT[variant] for variant in plan["variants"]) + " |"]
    lines += ["|---" * (len(plan["variants"]) + 1) + "|"]
    columns = [
        _rises(cells[variant], plan["rates"]) if variant in cells else None
        for variant in plan["variants"]
    ]
    for row, name in enumerate(["first gradient", *(f"{rate:g}" for rate in plan["rates"])]):
        lines.append(
            f"| {name} | " + " | ".join(NOT_RUN if c is None else c[row] for c in columns) + " |"
        )
    return "\n".join(lines)


def _rises(cell: dict[str, Any], rates: list[float]) -> list[str]:
    words = [f"{median(cell['gradient']['start']):.3g}"]
    for members in (by_rate(cell)[rate] for rate in rates):
        steps = [cell["rise"][member] for member in members]
        worst = [
            max(math.inf if row[m] is None else row[m] for row in cell["opening"]) for m in members
        ]
        words.append(
            f"{', '.join('never' if s is None else str(s) for s in steps)} ({median(worst):.3g})"
        )
    return words


def settings_table(results: dict[str, Any]) -> str:
    s = results["settings"]
    words = {
        "warmup": "warm-up steps",
        "clip": "gradient norm at most",
        "decay": "cosine decay to a tenth",
    }
    lines = ["| | " + " | ".join(s["plans"]) + " |", "|---" * (len(s["plans"]) + 1) + "|"]
    for name in (
        "width",
        "heads",
        "context",
        "batch",
        "steps",
        "seeds",
        "norm",
        "warmup",
        "decay",
        "clip",
        "rates",
    ):
        row = [plan[name] for plan in s["plans"].values()]
        shown = [", ".join(f"{x:g}" for x in v) if isinstance(v, list) else _word(v) for v in row]
        lines.append(f"| {words.get(name, name)} | " + " | ".join(shown) + " |")
    lines += ["", f"{s['optimiser']}; {s['arithmetic']}; {s['device']}, torch {s['torch']}. "]
    lines[-1] += (
        f"The unigram baseline is {s['unigram_loss']:.3f}, the bigram baseline "
        f"{results['bigram_loss']:.3f}."
    )
    return "\n".join(lines)


def _word(value: Any) -> str:
    return (
        {True: "yes", False: "no", None: "no"}[value]
        if isinstance(value, bool | None)
        else str(value)
    )


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The generated parts of the page, by the names of their marks."""
    return {
        "settings": settings_table(results),
        **{
            name: grid_table(results, name)
            for name in ("grid", "balls", "halves")
            if name in results["settings"]["plans"]
        },
        "long": long_table(results),
        **{name: breaking_table(results, name) for name in breaking_plans(results)},
        "largest rates": largest_rates(results),
        "rises": rises_table(results),
    }


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its tables filled in from the results."""
    for name, table in tables(results).items():
        found = re.search(f"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", page, re.DOTALL)
        assert found, f"{PAGE.name} has no place for the table {name}"
        page = f"{page[: found.start()]}{table}\n{page[found.end() :]}"
    return page


def main() -> None:
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(filled(PAGE.read_text(), results))
    draw_grid(results).savefig(GALLERY / "training.png", dpi=110)
    draw_breaking(results).savefig(GALLERY / "breaking.png", dpi=110)


if __name__ == "__main__":
    main()
