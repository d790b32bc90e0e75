"""The distance for causal attention on measures over [0, 1] x R^d: transport at each position.

    d_p(mu, nu) = ( integral of W_p(mu^s, nu^s)^p d theta(s) )^{1/p}
    d_inf(mu, nu) = ess sup over s of W_inf(mu^s, nu^s)

theta is the law of the position, which both measures share; mu^s is the law of the token at
position s. Attention never moves a position, so that the image measures share theta too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._types import UserError
from lipscope.mean_field.measures import DiscreteMeasure
from lipscope.mean_field.transport import NEGLIGIBLE, atoms_distance, check_pair, power_mean


@entry_point
def conditional_distance(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float = 2) -> float:
    """Compute the distance d_p of two measures with positions.

    Mass moves at a fixed position only: d_p is the L^p mean over positions of the Wasserstein
    distance W_p between the tokens there.

    Args:
        mu: First measure, with positions.
        nu: Second measure, with the same law of positions.
        p: Exponent, at least 1; `math.inf` for the longest move.

    Returns:
        The distance, computed in float64.

    Raises:
        UserError: If positions are missing, or their laws differ (the distance is then infinite).

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        >>> mu = ls.mean_field.DiscreteMeasure.uniform(X, causal=True)
        >>> nu = mu.moved(torch.tensor([[3.0], [4.0]], dtype=torch.float64))
        >>> round(ls.mean_field.conditional_distance(mu, nu), 6)  # sqrt((9 + 16) / 2)
        3.535534
    """
    check_pair(mu, nu, p)
    if mu.positions is None or nu.positions is None:
        raise UserError(
            "conditional_distance needs measures with positions; without them use wasserstein"
        )
    here = _fibres(mu)
    there = _fibres(nu)
    if mu.positions.dtype != nu.positions.dtype and here.keys() != there.keys():
        raise UserError(
            "d_p needs measures with the same law of positions, bit by bit; the first has "
            f"positions in {mu.positions.dtype} and the second in {nu.positions.dtype}, which "
            "round differently; compute both in one dtype "
            "(DiscreteMeasure.uniform(X, causal=True) uses torch.float64)"
        )
    _check_marginals(here, there)
    moves = []
    for s, (x, a) in here.items():
        y, b = there[s]
        moves.append((a.sum().item(), atoms_distance(x, a / a.sum(), y, b / b.sum(), p)))
    mass, length = torch.tensor(moves, dtype=torch.float64).T
    return power_mean(mass, length, p)


def _fibres(mu: DiscreteMeasure) -> dict[float, tuple[Tensor, Tensor]]:
    """For each position, in order, the points there and their masses."""
    assert mu.positions is not None
    order = mu.positions.argsort(stable=True)
    values, counts = torch.unique_consecutive(mu.positions[order], return_counts=True)
    points = mu.points[order].double().split(counts.tolist())
    weights = mu.weights[order].double().split(counts.tolist())
    return dict(zip(values.tolist(), zip(points, weights, strict=True), strict=True))


def _check_marginals(here: dict, there: dict) -> None:
    for s in sorted(here.keys() ^ there.keys()):
        owner = "first" if s in here else "second"
        raise UserError(
            "d_p needs measures with the same law of positions; "
            f"only the {owner} has mass at position {s!r}"
        )
    for s, (_, a) in here.items():
        first = a.sum().item()
        second = there[s][1].sum().item()
        if abs(first - second) > max(NEGLIGIBLE, 1e-9 * first):
            raise UserError(
                f"d_p needs measures with the same law of positions; position {s:.6g} has mass "
                f"{first:.9g} in the first and {second:.9g} in the second"
            )
