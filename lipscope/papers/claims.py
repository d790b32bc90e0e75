"""Claims of the papers: how to run and judge one, what a verdict says, and fitted power laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lipscope.papers.page import Picture
    from lipscope.papers.setting import Setting

Numbers = dict[str, Any]
"""What a run measured: JSON, stored as it is; the only thing that a judge and a plot see."""

CONFIDENCE = 0.95
FIXED = 2e-3
"""Relative spread below which a quantity counts as constant; a LayerNorm leaves less."""

PAPERS = {
    "castin2024": "Castin, Ablin and Peyré (2024), How smooth is attention?",
    "kim2021": "Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention",
}


class Kind(StrEnum):
    """What a verdict says."""

    REPRODUCED = "REPRODUCED"
    DIFFERS = "DIFFERS"
    STAND_IN = "STAND-IN"
    NEEDS = "NEEDS"


@dataclass(frozen=True)
class Quoted:
    """What a paper states: numbers by name, and where they stand."""

    source: str
    values: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name]


SCRIPT = "released scripts of Castin et al. (2024)"
SLIDES = "slides of Castin et al. (2024)"
FIRST = "first version of Castin et al. (2024)"
KIM = "Kim et al. (2021)"
ANSWERS = "the authors' answers to the reviews, OpenReview DHSNrGhAY7W"

QUOTED: dict[str, Quoted] = {
    **{
        f"C{first + i}": Quoted(f"{SCRIPT}, {folder}, figure {i + 1} of 8")
        for first, folder in ((1, "bert_encoder"), (9, "bert_decoder"), (17, "gpt2_random"))
        for i in range(8)
    },
    **{
        name: Quoted(f"{SCRIPT}, {where}", {"constant": constant, "exponent": exponent})
        for name, where, constant, exponent in (
            ("C1", "bert_encoder, Alice, layer 0: the curve labelled c n^(1/4)", 14.3, 0.24),
            ("C9", "bert_decoder, Alice, layer 0, curve", 6.44, 0.25),
            ("C10", "bert_decoder, Alice, layer 6, curve", 6.44, 0.25),
            ("C18", "gpt2_random, Alice, layer 6: the curve labelled c n^(1/4)", 0.445, 0.25),
            ("C22", "gpt2_random, AG_NEWS, layer 6: the curve labelled c n^(1/4)", 0.445, 0.25),
            ("C25", "gpt_2, Alice, layer 0, curve", 35.3, 0.26),
            ("C26", "gpt_2, Alice, layer 6, curve", 25.0, 0.51),
        )
    },
    "C27": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 0, over radius"),
    "C28": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 6, over radius"),
    "C29": Quoted(f"{SCRIPT}, gpt_2, Alice, layer 6, size of tokens over length"),
    "C30": Quoted(
        f"{SCRIPT}, adversarial_data, BERT, layer 0, head 0",
        {"constant": 4.39, "exponent": 0.5, "R": 15.5, "layer": 0, "head": 0},
    ),
    "C31": Quoted(
        f"{SCRIPT}, adversarial_data, BERT as a decoder, layer 6, head 7",
        {"constant": 5.73, "exponent": 0.5, "R": 21.5, "layer": 6, "head": 7},
    ),
    "C32": Quoted(
        f"{SCRIPT}, adversarial_data, random GPT-2, layer 6, head 0, seed 320",
        {"constant": 0.92, "exponent": 0.5, "R": 100, "layer": 6, "head": 0, "seed": 320},
    ),
    "C33": Quoted(
        f"{SCRIPT}, adversarial_data, GPT-2, layer 0, head 0",
        {"constant": 46.9, "exponent": 0.5, "R": 10, "layer": 0, "head": 0},
    ),
    "C34": Quoted(f"{SCRIPT}, adversarial_data, toolbox, compute_bound"),
    "S1": Quoted(f"{SLIDES}, Theorems 1 and 2"),
    "S2": Quoted(
        f"{SLIDES}, R²γ ≈ 10² to 10³ in practical Transformers", {"low": 1e2, "high": 1e3}
    ),
    "S3": Quoted(f"{SLIDES}, example of Kim et al.", {"exponent": 2}),
    "S4": Quoted(f"{SLIDES}, large-radius regime"),
    "S5": Quoted(f"{SLIDES}, mean-field regime"),
    "S6": Quoted(f"{SLIDES}, picture of two plans"),
    "S7": Quoted(f"{SLIDES}, masked attention on measures: the same upper bound"),
    "S8": Quoted(f"{SLIDES}, L layers of step 1/L", {"exponent": -1}),
    "S9": Quoted(f"{SLIDES}, clusters of renormalised tokens"),
    "S10": Quoted(f"{SLIDES}, clusters for Gaussian inputs"),
    "S11": Quoted(f"{SLIDES}, context of 128k tokens", {"length": 131072}),
    "V1": Quoted(f"{FIRST}, section 3.2"),
    "V2": Quoted(f"{FIRST}, Figure 2"),
    "V3": Quoted(f"{FIRST}, search by gradient ascent"),
    "V4": Quoted(f"{FIRST}, attacks that split tokens"),
    "V5": Quoted(f"{FIRST}, open question on the scaling with length"),
    "V6": Quoted(f"{FIRST}, open question on finite and general splitting"),
    "V7": Quoted(f"{FIRST}, open question on tokens from features"),
    "V8": Quoted(f"{FIRST}, open question on which maps split"),
    "N1": Quoted("proposed check of Castin et al. (2024): bounds against implementations"),
    "N2": Quoted("proposed check of Castin et al. (2024): attacks guided by the constant"),
    "N3": Quoted("proposed check of Castin et al. (2024): where √n stops being tight"),
    "K1": Quoted(
        f"{KIM}, section 5.1, Figure 2; lengths and starts: {ANSWERS}",
        {"largest length": 1000, "starts": 50},
    ),
    "K2": Quoted(f"{KIM}, appendix K; {ANSWERS}"),
    "K3": Quoted(f"{KIM}, section 5.2, Figure 3"),
    "K4": Quoted(f"{KIM}, section 5.3, Figure 4"),
    "K5": Quoted(f"{KIM}, Table 2 in appendix I"),
    "K6": Quoted(f"{KIM}, Figure 10 in appendix N; {ANSWERS}"),
    "K7": Quoted(
        f"{KIM}, Figure 11 in appendix N; depths: {ANSWERS}",
        {"dot product trains to depth": 10, "L2 trains to depth": 18},
    ),
    "K8": Quoted(f"{KIM}, Table 3 in appendix N; {ANSWERS}"),
    "K9": Quoted(f"{KIM}, Theorem 3.1", {"exponent of R": 2}),
    "K10": Quoted(
        f"{KIM}, Theorem 3.2",
        {"factor of ln N, norm inf": 4, "extra power of N, norm 2": 0.5},
    ),
    "A1": Quoted(f"{KIM}, sections 4 and 6, residual flows announced in {ANSWERS}"),
}
"""Every number and statement that is quoted from the papers, with its source."""

SAYS = {
    "C34": "the bound that the scripts return, compute_bound, is an upper bound of σ",
    "S1": "Theorems 1 and 2: bounds of order R²√n from above and below, masked and multi-head",
    "S2": "γR² is between 10² and 10³ in practical Transformers",
    "S3": "one token at zero among tokens of size R: σ grows like R²",
    "S4": "large radii: D f tends to V applied to the chosen tokens, at most ‖V‖√n",
    "S5": "mean field: at least (γ/2)R²exp(γR²), reached with n of order exp(2γR²) tokens",
    "S6": "W₂ compares measures by the optimal plan, not by index",
    "S7": "masked attention on measures has the same upper bound as without a mask",
    "S8": "L layers of step 1/L tend to the flow",
    "S9": "renormalised tokens form clusters",
    "S10": "Gaussian tokens form clusters too",
    "S11": "the constant at the context of GPT-4o, 128k tokens, is within reach",
    "V1": "the lower bound of order R²exp(γR²) is nearly attained by two Diracs",
    "V2": "infinitely many pairs of tokens on the line split",
    "V3": "gradient ascent on σ finds the worst inputs",
    "V4": "attacks that split a token beat those that move it",
    "V5": "open question: how the constant scales with length",
    "V6": "open question: whether finitely many copies do as well as any splitting",
    "V7": "open question: whether attacks on features carry over to tokens",
    "V8": "open question: which maps split",
    "N1": "the bounds hold for actual implementations, over lengths and architectures",
    "N2": "attacks guided by the constant succeed more often than random ones of equal norm",
    "N3": "√n is tight up to a number of tokens of order exp(2γR²)",
    "K1": "for the largest coordinate the bound of L2 attention is asymptotically tight",
    "K2": "in the Euclidean norm the same search stays far below the bound",
    "K3": (
        "fixed-point iteration inverts x + g(x) for contractive L2 attention, and fails for "
        "dot product where its Jacobian is large"
    ),
    "K4": (
        "character models: L2 attention ends behind dot product, contractive L2 behind both, "
        "and gains with depth"
    ),
    "K5": "the best test losses of L2 attention are close to those of dot product",
    "K6": (
        "at far tokens the outputs of trained L2 attention stay in the range of the inputs, "
        "those of dot product do not"
    ),
    "K7": (
        "at a fixed learning rate dot product fails beyond 10 layers, L2 and contractive L2 "
        "train to 18"
    ),
    "K8": "at a fixed learning rate the best test losses of the three are about equal",
    "K9": "dot-product attention has no Lipschitz constant, in any p-norm",
    "K10": "the bounds grow like log N (largest coordinate) and sqrt(N) log N (Euclidean)",
    "A1": "contractive attention gives residual flows with a correct density; dot product does not",
}
"""Claims in our own words; those of figures are made where the figures are."""


@dataclass(frozen=True)
class Verdict:
    """What stored numbers say about a claim.

    kind:     REPRODUCED, DIFFERS, STAND-IN or NEEDS
    holds:    whether the claim held where it was tested; None if it could not be tested
    interval: of the quantity that was judged, where it is one number
    reason:   what was compared with what; for DIFFERS, the cause that was tested
    """

    kind: Kind
    holds: bool | None
    interval: tuple[float, float] | None = None
    reason: str = ""


def judged(holds: bool, reason: str, interval: tuple[float, float] | None = None) -> Verdict:
    """The verdict of a claim that was tested as it is stated; `decide` knows about stand-ins."""
    kind = Kind.REPRODUCED if holds else Kind.DIFFERS
    return Verdict(kind=kind, holds=bool(holds), interval=interval, reason=reason)


class NotAvailable(Exception):  # noqa: N818, it is an answer, not an error
    """Raised by a run for something that the user must bring; the verdict is NEEDS."""


@dataclass(frozen=True)
class Claim:
    """One claim: an id, what the paper says, and how it is tested.

    id:    as in the table of the documentation, for example "C25"
    run:   measures; what it returns is stored
    judge: compares stored numbers with the quoted ones
    plot:  the figure beside the paper's, drawn from stored numbers
    needs: what the full test needs: "nothing", "gpu", "bert-base-uncased", "Alice text", ...
    says:  the claim in our own words; by default those of SAYS
    """

    id: str
    run: Callable[[Setting], Numbers]
    judge: Callable[[Numbers, Quoted], Verdict]
    plot: Callable[[Numbers], Picture] | None = None
    needs: str = "nothing"
    says: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", self.says or SAYS[self.id])

    @property
    def paper(self) -> str:
        """A name in PAPERS; the letter of the id says which."""
        return "kim2021" if self.id[0] in "KA" else "castin2024"


@dataclass(frozen=True)
class Fit:
    """y ~ x^alpha, and the interval [low, high] of alpha; rms is the residual in log y."""

    alpha: float
    low: float
    high: float
    rms: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    def contains(self, alpha: float, slack: float = 0.0) -> bool:
        """Whether an exponent lies in the interval, up to the rounding of a printed number."""
        return self.low - slack <= alpha <= self.high + slack

    def __str__(self) -> str:
        return f"{self.alpha + 0.0:.2f} [{self.low + 0.0:.2f}, {self.high + 0.0:.2f}]"


def power_law(points: Sequence[tuple[float, float]], held: Sequence[float] | None = None) -> Fit:
    """Least squares of log y on log x, one equation per point.

    Args:
        points: Pairs (x, y); pairs that are not positive are left out.
        held: A third quantity per point whose own power is fitted too, so that the exponent of x
            is the one at a fixed value of it.
    """
    from scipy.special import stdtrit

    third = [1.0] * len(points) if held is None else list(held)
    kept = [
        (x, y, z)
        for (x, y), z in zip(points, third, strict=True)
        if 0 < x < math.inf and 0 < y < math.inf and z > 0
    ]
    x, y, z = np.log(np.array(kept, dtype=np.float64).reshape(-1, 3)).T
    columns = [x - x.mean(), np.ones_like(x)] + ([] if held is None else [z - z.mean()])
    design = np.stack(columns, axis=1)
    freedom = len(y) - design.shape[1]
    fixed = x.std() < FIXED
    if freedom < 1 or fixed or np.linalg.matrix_rank(design) < design.shape[1]:
        # One value of x alone, or as many unknowns as points: the exponent could be anything.
        return Fit(0.0, -math.inf, math.inf, math.nan)
    found, *_ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ found
    spread = float(residual @ residual) / freedom * np.linalg.inv(design.T @ design)[0, 0]
    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(spread)
    alpha = float(found[0])
    return Fit(
        alpha=alpha,
        low=alpha - half,
        high=alpha + half,
        rms=math.sqrt(float(residual @ residual) / len(y)),
    )
