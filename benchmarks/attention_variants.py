"""Attention variants compared: constants on random and ascended inputs, bounds, cost; untied L2.

python benchmarks/attention_variants.py
python benchmarks/attention_variants.py --match "ball|contractive"    # only these layers
python benchmarks/attention_variants.py --text shakespeare.txt        # instead, test losses
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import lipscope as ls
from lipscope.nn.l2_attention import BALL
from lipscope.nn.parametrize import sigma_reparametrise, spectrally_normalise
from lipscope.papers.charlm.characters import CharacterText, read_characters
from lipscope.papers.charlm.language_model import Architecture
from lipscope.papers.charlm.training import Recipe, Training
from lipscope.papers.kim_bounds import untied_rows

DIM, HEADS, TOKENS = 32, 4, 32
COST_DIM, COST_TOKENS, COST_BATCH = 128, 128, 16
SEEDS, RECIPE = 3, Recipe(steps=600)
CLIMB = ls.attack.Climb(steps=25, restarts=2)
SHARES = [2.0**-j for j in range(10)]
"""Fractions of the radius at which the family of Kim et al. is tried before the ascent."""


def _contractive(
    norm: str, ball: float | None, dim: int, causal: bool
) -> ls.nn.ContractiveL2Attention:
    return ls.nn.ContractiveL2Attention(dim, HEADS, 0.9, norm, causal, ball)


VARIANTS: dict[str, Callable[[int, bool], nn.Module]] = {
    "dot product": lambda dim, causal: ls.nn.DotSelfAttention(dim, HEADS, causal),
    "temperature 4": lambda dim, causal: ls.nn.DotSelfAttention(
        dim, HEADS, causal, temperature=4.0
    ),
    "QK-norm": lambda dim, causal: ls.nn.DotSelfAttention(dim, HEADS, causal, qk_norm=True),
    "spectral normalisation": lambda dim, causal: spectrally_normalise(
        ls.nn.DotSelfAttention(dim, HEADS, causal)
    ),
    "sigma-reparam": lambda dim, causal: sigma_reparametrise(
        ls.nn.DotSelfAttention(dim, HEADS, causal)
    ),
    "scaled cosine": lambda dim, causal: ls.nn.CosineSelfAttention(dim, HEADS, causal),
    "L2": lambda dim, causal: ls.nn.L2SelfAttention(dim, HEADS, causal),
    "L2 in a ball": lambda dim, causal: ls.nn.BallL2Attention(dim, HEADS, causal),
    **{
        f"contractive L2{place}, 0.9, norm {norm}": partial(_contractive, norm, ball)
        for place, ball in (("", None), (" in a ball", BALL))
        for norm in ("2", "inf")
    },
}


def measurable(module: nn.Module, n: int = TOKENS) -> Callable[[torch.Tensor], torch.Tensor]:
    """The map with a closed-form Jacobian if the layer has one, else the module."""
    try:
        return module.as_map(n)
    except ls.UserError:
        return module


def small_among_large(module: nn.Module, R: float) -> torch.Tensor:
    """A token near 0 among tokens at +-R u, u the top direction of the values: Kim et al."""
    u = torch.linalg.svd(module.value.weight)[2][0]
    X = R * (1.0 - 2.0 * (torch.arange(TOKENS, dtype=torch.float64) % 2))[:, None] * u
    X[0] = 1e-3 * u.roll(1)
    return X


def constants(name: str) -> list[float]:
    """sigma at random unit-variance tokens (median of 8), and ascended for R = 6, 60 and 600."""
    torch.manual_seed(0)
    module = VARIANTS[name](DIM, False).double()
    for weight in module.parameters():
        weight.requires_grad_(False)
    f, X = measurable(module), torch.randn(8, TOKENS, DIM, dtype=torch.float64)
    typical = ls.local_lipschitz(f, X, 1e-4).value.median().item()
    high, best = [], []
    for R in (6.0, 60.0, 600.0):
        family = torch.stack([small_among_large(module, R * share) for share in SHARES])
        steepest = family[ls.local_lipschitz(f, family, 1e-3).value.argmax()]
        found = ls.attack.ascend(f, ls.Ball(R, TOKENS), CLIMB, dim=DIM, starts=[steepest, *best])
        high, best = [*high, found.value], [found.X]
    bounds = [module.lipschitz_bound(TOKENS, norm) for norm in ("2", "inf")]
    assert max(typical, *high) <= bounds[0]
    return [typical, *high, *bounds]


def costs() -> dict[str, float]:
    """Forward and backward in float32 relative to dot product; median of interleaved runs."""
    torch.manual_seed(0)
    X = torch.randn(COST_BATCH, COST_TOKENS, COST_DIM)
    modules = {name: make(COST_DIM, False) for name, make in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(12):
        for name, module in modules.items():
            start = time.perf_counter()
            module(X).square().sum().backward()
            seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(runs[2:]) for name, runs in seconds.items()}
    return {name: value / middle["dot product"] for name, value in middle.items()}


def test_losses(name: str, text: CharacterText) -> list[float]:
    """Nats per character on held-out text, by seed: 2 blocks of width 64, context 64."""
    found = []
    for seed in range(SEEDS):
        small = Architecture(len(text.alphabet), "dot", depth=2, width=64, heads=HEADS, context=64)
        recipe = replace(RECIPE, seed=seed)
        training = Training(
            text, small, recipe, torch.device("cpu"), lambda a: VARIANTS[name](a.width, True)
        )
        for _ in range(recipe.steps):
            training.advance()
        found.append(training.read().test)
    return found


def shown(value: float) -> str:
    return "none" if value == math.inf else f"{value:.3g}"


def print_losses(path: Path, match: str) -> None:
    text = read_characters(path, context=64)
    print(
        f"{RECIPE}, {SEEDS} seeds; unigram baseline {text.unigram_loss:.3f}, "
        f"bigram {text.bigram_loss:.3f}\n"
    )
    print("| layer | test loss, mean | standard deviation |")
    print("|---|---|---|")
    for name in filter(re.compile(match).search, VARIANTS):
        losses = test_losses(name, text)
        print(
            f"| {name} | {statistics.mean(losses):.3f} | {statistics.stdev(losses):.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--match", default="", help="only layers whose name has this pattern")
    options = parser.parse_args()
    if options.text:
        print_losses(options.text, options.match)
    else:
        print_constants(options.match)


def print_constants(match: str) -> None:
    cost = costs()
    print(
        f"n = {TOKENS}, dim = {DIM}, {HEADS} heads, float64, as initialised; "
        "cost: forward + backward, float32,"
    )
    print(f"n = {COST_TOKENS}, dim = {COST_DIM}, batch {COST_BATCH}, a multiple of dot product\n")
    print("| layer | random | R = 6 | R = 60 | R = 600 | bound, 2 | bound, inf | cost |")
    print("|---|---|---|---|---|---|---|---|")
    for name in filter(re.compile(match).search, VARIANTS):
        numbers = " | ".join(shown(value) for value in constants(name))
        print(f"| {name} | {numbers} | {cost[name]:.2f} |", flush=True)
    print("\n| L | untied | tied | bound, tied |")
    print("|---|---|---|---|")
    for row in untied_rows():
        print("| " + " | ".join(f"{value:.4g}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
