"""Outcomes of the trainings of a cell: by learning rate, the best, and those that failed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean
from typing import Any

NAMES = {
    "dot": "dot product",
    "l2": "L2",
    "contractive": "contractive L2, 0.9",
    "invertible": "contractive L2, 0.9, invertible blocks",
    "dot, l2 values": "dot scores, L2 values",
    "l2, dot values": "L2 scores, dot values",
    "sharper contractive": "contractive L2, 0.9, sharper bound",
    "ball": "L2 in a ball",
    "contractive ball": "contractive L2 in a ball, 0.9",
    "invertible ball": "contractive L2 in a ball, 0.9, invertible blocks",
}


def broke(final: float | None, curve: list[float | None], unigram: float) -> bool:
    """The criterion of breaking, fixed before the first run; None stands for a non-finite loss."""
    best = min((x for x in curve if x is not None), default=math.inf)
    return final is None or final > unigram or final > best + 0.5


def stuck(final: float, unigram: float) -> bool:
    """Whether a training that did not break is hardly better than character frequencies."""
    return final > unigram - 0.1


@dataclass(frozen=True)
class Outcome:
    """The seeds of one learning rate: test losses, and how many broke or got stuck."""

    learned: list[float]
    broken: int
    stuck: int

    @property
    def fine(self) -> bool:
        return self.broken == self.stuck == 0

    def __str__(self) -> str:
        words = [f"{mean(self.learned):.3f}"] if self.learned else []
        for count, word in ((self.broken, "broke"), (self.stuck, "stuck")):
            whole = count == len(self.learned) + self.broken + self.stuck
            words += [word if whole else f"{count} {word}"] if count else []
        return ", ".join(words)


def outcomes(cell: dict[str, Any], unigram: float) -> dict[float, Outcome]:
    """The outcome at every learning rate of a cell."""
    found = {}
    for rate, members in by_rate(cell).items():
        finals = [
            (cell["final"][m], [point["test"][m] for point in cell["curve"]]) for m in members
        ]
        unbroken = [final for final, curve in finals if not broke(final, curve, unigram)]
        learned = [final for final in unbroken if not stuck(final, unigram)]
        found[rate] = Outcome(learned, len(members) - len(unbroken), len(unbroken) - len(learned))
    return found


def by_rate(cell: dict[str, Any]) -> dict[float, list[int]]:
    """The members of a cell, by learning rate."""
    rates: dict[float, list[int]] = {}
    for member, (rate, _) in enumerate(cell["members"]):
        rates.setdefault(rate, []).append(member)
    return rates


def best_rate(cell: dict[str, Any]) -> tuple[float, list[int]]:
    """The learning rate with the lowest mean test loss, and its members."""
    return min(
        by_rate(cell).items(), key=lambda item: mean(cell["final"][m] or 1e9 for m in item[1])
    )


def breaking_plans(results: dict[str, Any]) -> dict[str, Any]:
    """The plans without the usual safeguards against breaking."""
    return {name: plan for name, plan in results["settings"]["plans"].items() if not plan["decay"]}


def cells_of(results: dict[str, Any], plan: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The cells of a plan that have been run, by variant and depth."""
    settings = results["settings"]["plans"][plan]
    places = [(variant, depth) for variant in settings["variants"] for depth in settings["depths"]]
    names = {(variant, depth): f"{plan}/{variant}/{depth}" for variant, depth in places}
    return {
        place: results["cells"][name] for place, name in names.items() if name in results["cells"]
    }
