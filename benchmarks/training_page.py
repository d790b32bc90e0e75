"""Tables and figure of docs/training.md, from the results of `benchmarks.training_grid`.

python -m benchmarks.training_page              # rewrites the tables between their marks, and the figure
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.training_grid import broke

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "training_h200.json"
PAGE, FIGURE = ROOT / "docs" / "training.md", ROOT / "docs" / "gallery" / "training.png"
NAMES = {
    "dot": "dot product",
    "l2": "L2",
    "contractive": "contractive L2, 0.9",
    "invertible": "contractive L2, 0.9, invertible blocks",
}


def by_rate(cell: dict[str, Any]) -> dict[float, list[int]]:
    """The members of a cell, by learning rate."""
    rates: dict[float, list[int]] = {}
    for member, (rate, _) in enumerate(cell["members"]):
        rates.setdefault(rate, []).append(member)
    return rates


def best_rate(cell: dict[str, Any]) -> tuple[float, list[int]]:
    """The learning rate with the lowest mean test loss, and its members."""
    return min(by_rate(cell).items(), key=lambda item: mean(cell["final"][m] or 1e9 for m in item[1]))


def grid_table(results: dict[str, Any]) -> str:
    plan = results["settings"]["plans"]["grid"]
    lines = ["| attention | depth | parameters | test loss | at rate | other rate | sigma by layer | seconds |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for variant in plan["variants"]:
        for depth in plan["depths"]:
            cell = results["cells"].get(f"grid/{variant}/{depth}")
            start = f"| {NAMES[variant]} | {depth} |"
            if cell is None:
                lines.append(f"{start} | not run | | | | |")
                continue
            rate, members = best_rate(cell)
            losses = [cell["final"][m] for m in members]
            others = [mean(cell["final"][m] for m in ms) for r, ms in by_rate(cell).items() if r != rate]
            sigma = cell["sigma"][str(members[0])]
            lines.append(
                f"{start} {cell['parameters']:,} | {mean(losses):.3f} ± {stdev(losses):.3f} | {rate:g} | "
                f"{', '.join(f'{x:.3f}' for x in others)} | {min(sigma):.2g} to {max(sigma):.2g} | "
                f"{cell['seconds_training']:.0f} |"
            )
    return "\n".join(lines)


def breaking_table(results: dict[str, Any]) -> str:
    """For each learning rate: the mean test loss of the seeds that did not break, and how many did."""
    unigram = results["settings"]["unigram_loss"]
    plans = {name: plan for name, plan in results["settings"]["plans"].items() if name != "grid"}
    there = [
        (name, depth, variant)
        for name, plan in plans.items()
        for depth in plan["depths"]
        for variant in plan["variants"]
        if f"{name}/{variant}/{depth}" in results["cells"]
    ]
    header = [f"{NAMES[variant]}, depth {depth}, {name}" for name, depth, variant in there]
    lines = ["| learning rate | " + " | ".join(header) + " |", "|---" * (len(there) + 1) + "|"]
    for rate in plans["no norm"]["rates"]:
        entries = []
        for name, depth, variant in there:
            cell = results["cells"][f"{name}/{variant}/{depth}"]
            members = by_rate(cell)[rate]
            broken = [m for m in members if broke(cell["final"][m], [p["test"][m] for p in cell["curve"]], unigram)]
            fine = [cell["final"][m] for m in members if m not in broken]
            words = [f"{mean(fine):.3f}"] if fine else []
            words += [f"{len(broken)} of {len(members)} break"] if broken else []
            entries.append(", ".join(words))
        lines.append(f"| {rate:g} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def settings_table(results: dict[str, Any]) -> str:
    s = results["settings"]
    words = {"warmup": "warm-up steps", "clip": "gradient norm at most", "decay": "cosine decay to a tenth"}
    lines = ["| | " + " | ".join(s["plans"]) + " |", "|---" * (len(s["plans"]) + 1) + "|"]
    for name in ("width", "heads", "context", "batch", "steps", "seeds", "norm", "warmup", "decay", "clip", "rates"):
        row = [plan[name] for plan in s["plans"].values()]
        shown = [", ".join(f"{x:g}" for x in v) if isinstance(v, list) else _word(v) for v in row]
        lines.append(f"| {words.get(name, name)} | " + " | ".join(shown) + " |")
    lines += ["", f"{s['optimiser']}; {s['arithmetic']}; {s['device']}, torch {s['torch']}. "]
    lines[-1] += f"Frequencies of characters alone cost {s['unigram_loss']:.3f}, of pairs {results['bigram_loss']:.3f}."
    return "\n".join(lines)


def _word(value: Any) -> str:
    return {True: "yes", False: "no", None: "no"}[value] if isinstance(value, bool | None) else str(value)


TABLES = {"settings": settings_table, "grid": grid_table, "breaking": breaking_table}


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its tables as the results have them."""
    for name, table in TABLES.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(page), f"{PAGE.name} has no place for the table {name}"
        page = pattern.sub(lambda found, table=table: found[1] + table(results) + "\n" + found[2], page)
    return page


def draw(results: dict[str, Any]) -> None:
    """Test loss over steps for every cell of the grid, and sigma by layer in the deepest one of each."""
    from matplotlib.figure import Figure

    plan = results["settings"]["plans"]["grid"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss, sigma = figure.subplots(1, 2)
    for colour, variant in enumerate(plan["variants"]):
        cells = {d: results["cells"].get(f"grid/{variant}/{d}") for d in plan["depths"]}
        for style, (depth, cell) in zip(("dotted", "dashed", "solid"), cells.items(), strict=True):
            if cell is None:
                continue
            _, members = best_rate(cell)
            curve = [mean(point["test"][m] for m in members) for point in cell["curve"]]
            steps = [point["step"] for point in cell["curve"]]
            loss.plot(steps, curve, color=f"C{colour}", linestyle=style, label=f"{NAMES[variant]}, depth {depth}")
            values = cell["sigma"][str(members[0])]
            sigma.plot(range(len(values)), values, color=f"C{colour}", linestyle=style, marker=".")
    for level, words in ((results["settings"]["unigram_loss"], "frequencies"), (results["bigram_loss"], "pairs")):
        loss.axhline(level, color="gray", linewidth=0.8)
        loss.annotate(words, (plan["steps"], level), color="gray", ha="right", va="bottom", fontsize="small")
    loss.set(xlabel="step", ylabel="test loss (nats a character)", ylim=(1.5, 3.5))
    sigma.set(xlabel="layer", ylabel="local Lipschitz constant of attention", yscale="log")
    figure.legend(*loss.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(filled(PAGE.read_text(), results))
    draw(results)


if __name__ == "__main__":
    main()
