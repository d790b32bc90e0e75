"""The experiments on training: what varies, what is fixed, and smaller sizes for a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.attention_hybrids import DotScoresL2Values, L2ScoresDotValues
from lipscope.nn.contractive import ContractiveL2Attention
from lipscope.nn.l2_attention import reaction
from lipscope.papers.charlm.language_model import Architecture, Variant
from lipscope.papers.trainings import Plan

FORMER = {8: 6.40629, 16: 9.23277, 32: 12.98099, 128: 23.79452}
"""The bound of causal L2 attention with identity weights before it was logarithmic, by context."""


def make_former(a: Architecture) -> ContractiveL2Attention:
    """Contractive attention as it was with the former bound, which made it weaker."""
    now = reaction(a.context, a.width // a.heads, True, "2")
    constant = a.constant * min(1.0, now / FORMER[a.context])
    return ContractiveL2Attention(a.width, a.heads, constant, causal=True)


VARIANTS = {
    "dot": Variant("dot"),
    "l2": Variant("l2"),
    "contractive": Variant("contractive", make=make_former),
    "invertible": Variant("contractive", invertible=True, make=make_former),
    "sharper contractive": Variant("contractive"),
    "ball": Variant("ball"),
    "contractive ball": Variant("contractive-ball"),
    "invertible ball": Variant("contractive-ball", invertible=True),
    "dot, l2 values": Variant("dot", make=lambda a: DotScoresL2Values(a.width, a.heads)),
    "l2, dot values": Variant("l2", make=lambda a: L2ScoresDotValues(a.width, a.heads)),
}


GRID = Plan(
    depths=(2, 6, 12), rates=(1e-3, 3e-3, 1e-2), variants=("dot", "l2", "contractive", "invertible")
)
BALLS = ("sharper contractive", "ball", "contractive ball", "invertible ball")
HYBRIDS = ("dot, l2 values", "l2, dot values")
HARD = Plan(
    depths=(12, 24),
    rates=(1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1),
    variants=GRID.variants,
    norm="none",
    batch=16,
    steps=200,
    warmup=0,
    decay=False,
    clip=None,
    every=25,
)
GENTLE = (3e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3)
FINE = (1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2)
PLANS = {
    "grid": GRID,
    "halves": replace(GRID, depths=(6,), variants=HYBRIDS),
    "long": replace(GRID, depths=(6,), rates=(3e-3,), variants=("l2",), steps=4000, every=200),
    "post norm": replace(
        HARD, depths=(6, 12, 18), rates=GENTLE, variants=("dot", "l2"), norm="post", steps=250
    ),
    "pre norm": replace(HARD, rates=HARD.rates[1:], variants=("dot", "l2"), norm="pre"),
    "no norm": HARD,
    "balls": replace(GRID, rates=GRID.rates[1:], variants=BALLS),
    "balls, no norm": replace(HARD, variants=BALLS),
    "why": replace(HARD, depths=(12,), rates=FINE, variants=("dot", *HYBRIDS, "l2")),
}
"""Equal budgets with the usual choices, what L2 attention loses there; then none, by norms.

The plans "balls" repeat the first and the last of them with what came later.
"""

SIZES: dict[str, dict[str, Any]] = {
    "full": {},
    "small": {"width": 32, "heads": 2, "context": 32, "batch": 8, "seeds": 2, "tested": 256},
    "tiny": {
        "width": 16,
        "heads": 2,
        "context": 16,
        "batch": 4,
        "seeds": 2,
        "tested": 8,
        "steps": 6,
        "every": 3,
    },
}
"""The experiment at full size, in minutes on a CPU, and in seconds as a test."""
