"""The two-Dirac measures on which attention is least smooth, and how n tokens approach them.

    mu = p delta_{Ru} + (1 - p) delta_{-Ru},   A u = gamma_min u, gamma = -gamma_min     (opposite)
    mu = p delta_{Ru} + (1 - p) delta_{Ru/2},  A u = gamma_1 u,   gamma = gamma_1 / 8    (same side)

At p = p_R = e^{-2 gamma R^2} the crowd gives the few half of its weight, and ||D_mu F|| is at least
|Vu| (gamma/2) R^2 e^{gamma R^2}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_whole
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.estimate import as_batch, as_single
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field.measures import DiscreteMeasure, derivative, stacked
from lipscope.mean_field.upper_bounds import check_scores
from lipscope.theorems.castin2024 import Adversary, adversaries
from lipscope.theorems.statement import heads_of


@dataclass(frozen=True, eq=False)
class TwoDiracs(Displayed):
    """The measure p delta_{Ru} + (1 - p) delta_{crowd u} with p = p_R, and its lower bound.

    guaranteed: |Vu| (gamma/2) R^2 e^{gamma R^2}, a lower bound of ||D_mu F||.
    """

    measure: DiscreteMeasure
    gamma: float
    p: float
    guaranteed: float


@dataclass(frozen=True, eq=False)
class Transition(Displayed):
    """sigma[i] = ||D_X f|| of n[i] tokens of the two-Dirac family in the ball of radius R.

    predicted: number of tokens beyond which sigma stops growing, 1 / p_R.
    plateau:   ||D_mu F|| of the two-Dirac measure, the limit n -> infinity.
    """

    R: float
    n: list[int]
    sigma: Tensor
    predicted: float
    plateau: float

    def plot(self, ax: Any = None) -> Any:
        """Plot sigma against n, with the prediction; returns matplotlib Axes."""
        from lipscope.report.figures import draw_transitions, new_axes

        return draw_transitions([self], new_axes(ax))


@entry_point
def two_diracs(f: SelfAttention, R: float, family: str | None = None) -> TwoDiracs:
    """Return the two-Dirac measure in a ball on which attention is least smooth.

    Its constant grows like `R^2 e^{gamma R^2}`.

    Args:
        f: One head with dot-product scores, without mask and query bias.
        R: Radius of the ball.
        family: "opposite" (atoms at `Ru` and `-Ru`) or "same side" (`Ru` and `Ru/2`); by default
            the one with the larger gamma.

    Returns:
        An object with the `measure`, `gamma`, the weight `p` of the first atom, and `guaranteed`, a
        proved lower bound of `||D_mu F||`.

    Raises:
        UserError: If `A = K'Q/sqrt(k)` has no real eigenvalue of the required sign, or `p`
            underflows.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> found = ls.mean_field.two_diracs(ls.SelfAttention(-one, one, one), R=2.0)
        >>> found.measure.points.flatten().tolist(), round(found.guaranteed, 3)
        ([2.0, -2.0], 109.196)
    """
    if not (math.isfinite(R) and R > 0):
        raise UserError(f"R must be a positive radius, got {R!r}")
    worst, stretch = _direction(f, family)
    gamma = worst.gamma
    p = math.exp(-2 * gamma * R * R)
    if p < torch.finfo(f.Q.dtype).tiny:
        raise UserError(
            f"p_R = e^(-2 gamma R^2) = e^({-2 * gamma * R * R:.0f}) underflows {f.Q.dtype}; "
            "reduce R"
        )
    points = R * torch.stack([worst.u, worst.crowd * worst.u])
    measure = DiscreteMeasure(points, points.new_tensor([p, -math.expm1(-2 * gamma * R * R)]))
    return TwoDiracs(
        measure=measure,
        gamma=gamma,
        p=p,
        guaranteed=stretch * gamma / 2 * R * R * math.exp(gamma * R * R),
    )


@entry_point
def transition(f: SelfAttention, R: float, n_max: float, per_decade: int = 4) -> Transition:
    """Compute ||D_X f|| for n = 2, ..., n_max tokens of the two-Dirac family.

    A share p_R of the tokens, at least one, is at `Ru`, the others are in the crowd. While
    `n < e^{2 gamma R^2}` a single token rules all others and sigma grows like sqrt(n); beyond, the
    share p_R can be met and sigma stays. A measure of two atoms represents all n tokens, so that n
    can be as large as 10^30.

    Args:
        f: One head with dot-product scores, without mask and query bias.
        R: Radius of the ball.
        n_max: Largest number of tokens, at least 2.
        per_decade: Number of values of n per power of ten.

    Returns:
        An object with the lists `n` and `sigma`, the `predicted` transition and the `plateau`.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> found = ls.mean_field.transition(ls.SelfAttention(-one, one, one), R=1.0, n_max=100)
        >>> found.n
        [2, 3, 6, 10, 18, 32, 56, 100]
        >>> round(found.predicted, 3), bool(abs(found.sigma[-1] / found.plateau - 1) < 0.1)
        (7.389, True)
    """
    if not (math.isfinite(n_max) and n_max >= 2):
        raise UserError(f"n_max must be a finite number of at least 2 tokens, got {n_max!r}")
    check_whole("per_decade", per_decade, 0, 1000)  # before as many numbers are made
    if per_decade < 1:
        raise UserError(
            "per_decade, the number of values of n per power of ten, must be at least 1, "
            f"got {per_decade!r}"
        )
    worst = two_diracs(f, R)
    top = math.floor(per_decade * math.log10(n_max) + 1e-9)
    counts = sorted(
        {2, int(n_max)} | {max(2, round(10 ** (i / per_decade))) for i in range(top + 1)}
    )
    few = [min(n - 1, max(1, round(n * worst.p))) for n in counts]
    sigma = _repeated(f, worst.measure.points, counts, few)
    plateau = as_single(
        spectral_norm(derivative(f, worst.measure), 1e-9, solver=Solver(seed=0))
    ).value
    return Transition(R=R, n=counts, sigma=sigma, predicted=1 / worst.p, plateau=plateau)


def _repeated(f: SelfAttention, atoms: Tensor, counts: list[int], few: list[int]) -> Tensor:
    """||D_X f|| for counts[i] tokens, few[i] of them at the first atom, the rest at the second."""
    # By symmetry the Jacobian splits: fields that move all copies of an atom alike give ||D_mu F||,
    # fields of mean zero on the copies give the query block of the atom, if there are two copies.
    shares = [[m / n, (n - m) / n] for n, m in zip(counts, few, strict=True)]
    copied = torch.tensor([[m > 1, n - m > 1] for n, m in zip(counts, few, strict=True)])
    whole, blocks = stacked(f, atoms.expand(len(counts), -1, -1), atoms.new_tensor(shares))
    together, apart = (
        as_batch(spectral_norm(J, 1e-9, solver=Solver(seed=0))).value for J in (whole, blocks)
    )
    return torch.maximum(together, torch.where(copied, apart.reshape(-1, 2), 0.0).amax(dim=1))


def _direction(f: SelfAttention, family: str | None) -> tuple[Adversary, float]:
    """Find the worst family, with a unit vector u, and |Vu|."""
    if family not in (None, "opposite", "same side"):
        raise UserError(
            f'family must be "opposite", "same side", or None for the worse of the two, '
            f"got {family!r}"
        )
    check_scores(f)
    if f.heads != 1 or f.causal or (f.biases is not None and f.biases[0] is not None):
        raise UserError(
            "the two-Dirac families need one head without mask and query bias; use f.head(h)"
        )
    (head,) = heads_of(f.double(), folded=True)
    found = adversaries(head.A)
    if not found:
        raise UserError("A = K'Q/sqrt(k) has no real eigenvalue; the two-Dirac families need one")
    chosen = (one for one in found if family in (None, one.family))
    worst = max(chosen, key=lambda one: one.gamma)
    if worst.gamma <= 0:
        sign = {"opposite": "negative", "same side": "positive"}.get(family or "", "non-zero")
        raise UserError(f"A has no {sign} real eigenvalue; this family needs one")
    u = worst.u / worst.u.norm()
    return replace(worst, u=u.to(f.Q.dtype)), head.factor * (head.V @ u).norm().item()
