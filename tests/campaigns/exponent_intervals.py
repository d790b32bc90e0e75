"""How often do the intervals of growth exponents contain the exponent, and how wide are they?

    python -m tests.campaigns.exponent_intervals --draws 2000
    python -m tests.campaigns.exponent_intervals --draws 500 --only walk

Residuals of one sample may be correlated along n in several ways. Printed for each: the coverage of
Student's interval for independent residuals, that of the interval of `Study.growth`, and the ratio
of their widths.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from lipscope.study.growth import Growth, fit

LENGTHS = (8, 16, 32, 64, 128, 256)
ALPHA, NOISE = 0.25, 0.2
LOG_N = np.log(LENGTHS)

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""Residuals [samples, lengths] in units of NOISE."""


def independent(rng: np.random.Generator, samples: int) -> np.ndarray:
    return rng.normal(size=(samples, len(LENGTHS)))


def intercept(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Every sample has a level of its own."""
    return independent(rng, samples) + rng.normal(size=(samples, 1))


def slope(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Every sample has an exponent of its own, and with it a level."""
    return independent(rng, samples) + 0.5 * rng.normal(size=(samples, 1)) * LOG_N


def tilt(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Every sample has an exponent of its own, around the same mean level."""
    return independent(rng, samples) + 0.5 * rng.normal(size=(samples, 1)) * (LOG_N - LOG_N.mean())


def autoregressive(rho: float) -> Draw:
    def draw(rng: np.random.Generator, samples: int) -> np.ndarray:
        found = independent(rng, samples)
        for i in range(1, len(LENGTHS)):
            found[:, i] = rho * found[:, i - 1] + math.sqrt(1 - rho**2) * found[:, i]
        return found

    return draw


def walk(rng: np.random.Generator, samples: int) -> np.ndarray:
    return independent(rng, samples).cumsum(axis=1)


PROMISED: dict[str, Draw] = {
    "independent": independent,
    "random level": intercept,
    "random slope": slope,
    "AR(0.8)": autoregressive(0.8),
    "random walk": walk,
}
"""Residuals for which the interval contains the exponent in 94 % of draws or more."""

OTHERS: dict[str, Draw] = {"AR(0.4)": autoregressive(0.4), "random tilt": tilt}
"""Residuals that are too seldom recognised with few samples."""


def drawn(draw: Draw, samples: int, seed: int) -> tuple[Growth, float]:
    """A fitted law, and the half-width of Student's interval for independent residuals."""
    y = ALPHA * LOG_N + NOISE * draw(np.random.default_rng(seed), samples)
    points = [
        (n, math.exp(value)) for row in y for n, value in zip(LENGTHS, row.tolist(), strict=True)
    ]
    numbers = [sample for sample in range(samples) for _ in LENGTHS]
    plain = stats.linregress(np.tile(LOG_N, samples), y.ravel())
    half = stats.t.ppf(0.975, y.size - 2) * plain.stderr
    return fit("attention", 0, points, numbers), half


def measured(draw: Draw, samples: int, draws: int) -> tuple[float, float, float, float]:
    """Coverage of Student's interval and of ours; mean and median ratio of the widths."""
    found = [drawn(draw, samples, seed) for seed in range(draws)]
    plain = np.mean([abs(law.alpha - ALPHA) <= half for law, half in found])
    ours = np.mean([law.low <= ALPHA <= law.high for law, _ in found])
    widths = np.array([(law.high - law.low) / 2 for law, _ in found])
    halves = np.array([half for _, half in found])
    return (
        float(plain),
        float(ours),
        float(widths.mean() / halves.mean()),
        float(np.median(widths / halves)),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--draws", type=int, default=2000)
    options.add_argument("--only", default="", help="residuals with this in their name")
    given = options.parse_args()
    print("| residuals | samples | Student's covers | covers | width: mean | median |")
    print("|---|---|---|---|---|---|")
    for name, draw in {**PROMISED, **OTHERS}.items():
        for samples in (3, 8):
            if given.only in name:
                plain, ours, mean, middle = measured(draw, samples, given.draws)
                numbers = f"{plain:.3f} | {ours:.3f} | {mean:.2f} | {middle:.2f}"
                print(f"| {name} | {samples} | {numbers} |")


if __name__ == "__main__":
    main()
