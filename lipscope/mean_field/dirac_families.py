"""The two-Dirac measures on which attention is least smooth, and how n tokens come to look like a measure.

    mu = p delta_{Ru} + (1 - p) delta_{-Ru},   A u = gamma_min u, gamma = -gamma_min     (opposite)
    mu = p delta_{Ru} + (1 - p) delta_{Ru/2},  A u = gamma_1 u,   gamma = gamma_1 / 8    (same side)

At p = p_R = e^{-2 gamma R^2} the crowd attends to the few with half its weight, and ||D_mu F|| is at least
|Vu| (gamma/2) R^2 e^{gamma R^2}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field.attention_on_measures import derivative, stacked
from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.mean_field.upper_bounds import check_scores
from lipscope.theorems.heads import heads_of


@dataclass(frozen=True, eq=False)
class TwoDiracs:
    """A measure p delta_{Ru} + (1 - p) delta_{crowd u} with p = p_R, and what is proved about it.

    guaranteed: |Vu| (gamma/2) R^2 e^{gamma R^2} <= ||D_mu F||.
    """

    measure: DiscreteMeasure
    gamma: float
    p: float
    guaranteed: float


@dataclass(frozen=True, eq=False)
class Transition:
    """sigma[i] = ||D_X f|| of n[i] tokens, on the adversarial family; beyond n ~ predicted it grows no more.

    plateau: ||D_mu F|| of the two-Dirac measure, the limit n -> infinity.
    """

    n: list[int]
    sigma: Tensor
    predicted: float
    plateau: float


def two_diracs(f: SelfAttention, R: float, family: str | None = None) -> TwoDiracs:
    """The family "opposite" (Ru, -Ru) or "same side" (Ru, Ru/2); by default the one with the larger gamma."""
    if not (math.isfinite(R) and R > 0):
        raise UserError(f"R must be a positive radius, got {R!r}")
    gamma, u, crowd, stretch = _direction(f, family)
    p = math.exp(-2 * gamma * R * R)
    if p < torch.finfo(f.Q.dtype).tiny:
        raise UserError(
            f"p_R = e^(-2 gamma R^2) = e^({-2 * gamma * R * R:.0f}) is below the smallest number; reduce R"
        )
    points = R * torch.stack([u, crowd * u])
    measure = DiscreteMeasure(points, points.new_tensor([p, -math.expm1(-2 * gamma * R * R)]))
    return TwoDiracs(measure, gamma, p, stretch * gamma / 2 * R * R * math.exp(gamma * R * R))


def transition(f: SelfAttention, R: float, n_max: float, per_decade: int = 4) -> Transition:
    """||D_X f|| for n = 2 ... n_max tokens: as many at Ru as p_R asks for, at least one, and the rest in the crowd.

    While n < e^{2 gamma R^2} a single token rules all others and sigma grows like sqrt n; beyond, the proportion p_R
    can be met and sigma stays. A measure of two atoms stands for all n tokens, so that n may be 10^30.
    """
    if not (math.isfinite(n_max) and n_max >= 2):
        raise UserError(f"n_max must be a finite number of at least 2 tokens, got {n_max!r}")
    if per_decade < 1:
        raise UserError(
            f"per_decade, how many n from one power of ten to the next, must be at least 1, got {per_decade!r}"
        )
    worst = two_diracs(f, R)
    top = math.floor(per_decade * math.log10(n_max) + 1e-9)
    counts = sorted(
        {2, int(n_max)} | {max(2, round(10 ** (i / per_decade))) for i in range(top + 1)}
    )
    few = [min(n - 1, max(1, round(n * worst.p))) for n in counts]
    sigma = _repeated(f, worst.measure.points, counts, few)
    plateau = spectral_norm(derivative(f, worst.measure), 1e-9, solver=Solver(seed=0)).value
    return Transition(counts, sigma, 1 / worst.p, plateau)


def _repeated(f: SelfAttention, atoms: Tensor, counts: list[int], few: list[int]) -> Tensor:
    """||D_X f|| where X holds the first atom few[i] times among counts[i] tokens and the second for the rest.

    Fields that move all copies alike give ||D_mu F||; fields of mean zero on the copies of an atom see its query block.
    """
    shares = [[m / n, (n - m) / n] for n, m in zip(counts, few, strict=True)]
    copied = torch.tensor([[m > 1, n - m > 1] for n, m in zip(counts, few, strict=True)])
    whole, blocks = stacked(f, atoms.expand(len(counts), -1, -1), atoms.new_tensor(shares))
    together, apart = (spectral_norm(J, 1e-9, solver=Solver(seed=0)).value for J in (whole, blocks))
    return torch.maximum(together, torch.where(copied, apart.reshape(-1, 2), 0.0).amax(dim=1))


def _direction(f: SelfAttention, family: str | None) -> tuple[float, Tensor, float, float]:
    """gamma, its unit eigenvector u, where the crowd stands on it, and |Vu|."""
    if family not in (None, "opposite", "same side"):
        raise UserError(
            f'family must be "opposite", "same side" or None for the worse of the two, got {family!r}'
        )
    check_scores(f)
    if f.heads != 1 or f.causal or (f.biases is not None and f.biases[0] is not None):
        raise UserError(
            "the two-Dirac families are for one head without mask and query bias; take f.head(h)"
        )
    (head,) = heads_of(f.double(), folded=True)
    values, vectors = torch.linalg.eig(head.A)
    real = values.imag.abs() <= 1e-12 * values.abs().max()
    if not real.any():
        raise UserError("A = K'Q/sqrt(k) has no real eigenvalue; the two-Dirac families need one")
    values, vectors = values.real[real], vectors.real[:, real]
    low, high = values.argmin(), values.argmax()
    found = {
        "opposite": (-values[low].item(), vectors[:, low], -1.0),
        "same side": (values[high].item() / 8, vectors[:, high], 0.5),
    }
    gamma, u, crowd = found[family] if family else max(found.values(), key=lambda entry: entry[0])
    if gamma <= 0:
        sign = {"opposite": "negative", "same side": "positive"}.get(family or "", "non-zero")
        raise UserError(f"A has no {sign} real eigenvalue; this family needs one")
    u = u / u.norm()
    return gamma, u.to(f.Q.dtype), crowd, head.factor * (head.V @ u).norm().item()
