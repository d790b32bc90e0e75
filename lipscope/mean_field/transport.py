"""Distances between weighted measures, exactly: Wasserstein, and transport at each position.

W_p(mu, nu) is the least (sum_ij pi_ij |x_i - y_j|^p)^{1/p} over couplings pi; for p = inf it is the
shortest possible longest move. Causal attention acts on measures over [0, 1] x R^d, and there

    d_p(mu, nu) = ( integral of W_p(mu^s, nu^s)^p d theta(s) )^{1/p}
    d_inf(mu, nu) = ess sup over s of W_inf(mu^s, nu^s)

theta is the law of the position, which both measures share; mu^s is the law of the token at
position s. Attention never moves a position, so that the image measures share theta too.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._checks import check_exponent
from lipscope._types import UserError
from lipscope.mean_field.measures import DiscreteMeasure, check_measure

NEGLIGIBLE = 1e-13
"""Share of an atom that rounding alone can misplace; ignored, because W_inf counts it in full."""

SMALL_P = 8
"""Up to this exponent light atoms count little; plans for larger exponents start from its plan."""

LARGE_P = 1e12
"""The plan of this exponent serves for larger ones: its longest move is optimal up to a factor
min(n, m)^{1/LARGE_P}."""


@entry_point
def wasserstein(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float = 2) -> float:
    """Compute the Wasserstein distance W_p of two measures, exactly.

    On the line by sorting, in higher dimensions by a linear program.

    Args:
        mu: First measure, without positions.
        nu: Second measure, without positions.
        p: Exponent, at least 1; `math.inf` for the longest move.

    Returns:
        The distance, computed in float64.

    Raises:
        UserError: If a measure has positions (use `conditional_distance`), if the dimensions
            differ, or if an atom is too light for a large `p`.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> mu = ls.mean_field.DiscreteMeasure.uniform(torch.tensor([[0.0], [1.0]]))
        >>> nu = ls.mean_field.DiscreteMeasure.uniform(torch.tensor([[5.0], [3.0]]))
        >>> round(ls.mean_field.wasserstein(mu, nu, p=1), 6)  # 0 goes to 3 and 1 to 5
        3.5
    """
    check_pair(mu, nu, p)
    if mu.positions is not None or nu.positions is not None:
        raise UserError(
            "wasserstein needs measures without positions; use conditional_distance(mu, nu, p)"
        )
    return atoms_distance(mu.points, mu.weights, nu.points, nu.weights, p)


def check_pair(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> None:
    for given in (mu, nu):
        check_measure(given)
    check_exponent(p)


def atoms_distance(x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: float) -> float:
    """W_p of atoms x [n, d] with masses a and y [m, d] with masses b, both summing to one."""
    if x.shape[1] != y.shape[1]:
        raise UserError(
            f"the points of the measures have different sizes, {x.shape[1]} and {y.shape[1]}"
        )
    x, a, y, b = (t.detach().double().cpu() for t in (x, a, y, b))
    # Squares of coordinates could over- or underflow; scaling by a power of two rounds nothing.
    exponent = math.frexp(max(x.abs().max().item(), y.abs().max().item()))[1]
    unit = 2.0 ** max(-1000, min(exponent, 1000))
    x = x / unit
    y = y / unit
    if len(x) == 1 or len(y) == 1:
        mass = (a[:, None] * b[None]).flatten()
        length = distances(x, y).flatten()
    elif x.shape[1] == 1:
        mass, length = _match_sorted(x[:, 0], a, y[:, 0], b)
    else:
        D = distances(x, y)
        lightest = min(a.min(), b.min()).item()
        if p > SMALL_P and lightest < 1000 * NEGLIGIBLE:
            raise UserError(
                f"W_{p:g} counts atoms almost in full, and the lightest has mass {lightest:.1g}; "
                "in more than one dimension rounding hides where atoms below "
                f"{1000 * NEGLIGIBLE:g} go; use p <= {SMALL_P}, or leave them out"
            )
        plan = _bottleneck_plan(a, b, D) if math.isinf(p) else _cheapest_plan(a, b, D, p)
        mass = plan.flatten()
        length = D.flatten()
    distance = power_mean(mass, length, p) * unit
    if math.isinf(distance):
        raise UserError(
            "the distance is beyond the largest float64, 1.8e308; "
            "divide the points of both measures by 4"
        )
    return distance


def distances(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """|x_i - y_j| from differences: expanding the square would lose close points to rounding."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def power_mean(mass: Tensor, length: Tensor, p: float) -> float:
    """(sum of mass length^p)^{1/p}, for p = inf the longest length that carries mass."""
    longest = length[mass > 0].max()
    if math.isinf(p) or longest == 0:
        return longest.item()
    # Lengths without mass may be longer, and their powers would overflow.
    return ((mass * (length.clamp_max(longest) / longest) ** p).sum() ** (1 / p) * longest).item()


def _match_sorted(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Mass and length of each move on the line, in order: optimal for every convex cost."""
    i_order = x.argsort(stable=True)
    j_order = y.argsort(stable=True)
    xs = x[i_order].tolist()
    left = a[i_order].tolist()
    ys = y[j_order].tolist()
    open_ = b[j_order].tolist()
    whole = list(left), list(open_)
    mass = []
    length = []
    i = j = 0
    while i < len(xs) and j < len(ys):
        # Remainders instead of cumulative sums: equal masses leave nothing, and what rounding
        # leaves of an atom does not move anywhere.
        m = min(left[i], open_[j])
        mass.append(m)
        length.append(abs(xs[i] - ys[j]))
        left[i] -= m
        open_[j] -= m
        i = i + (left[i] <= NEGLIGIBLE * whole[0][i])
        j = j + (open_[j] <= NEGLIGIBLE * whole[1][j])
    return torch.tensor(mass, dtype=torch.float64), torch.tensor(length, dtype=torch.float64)


def _cheapest_plan(a: Tensor, b: Tensor, D: Tensor, p: float) -> Tensor:
    """Return the optimal coupling for the cost D^p."""
    # Next to a long distance rounding hides short ones: 1e-8 of it vanishes when squared, and so
    # does 1/2 of it for p = 60. So distances are cut off at a `reach` that no mass exceeds, and the
    # program is solved again until that is about the longest move. A cut edge is never worth its
    # cost: in a cycle that takes it, at most min(n, m) edges of the present plan are saved, which
    # together cost less. A large p starts from the plan of a smaller one, whose moves are short
    # already: from the whole diameter, rounding would let reach fall by 1e-16^{1/p} at a time.
    q = min(p, SMALL_P)
    reach = D.max().item()
    while True:
        plan = _plan_within(a, b, D, q, reach)
        while (shorter := D[plan > 0].max().item() * (2 * min(D.shape)) ** (1 / q)) and (
            shorter / reach
        ) ** q < 0.1:
            reach = shorter
            plan = _plan_within(a, b, D, q, reach)
        if q >= min(p, LARGE_P):
            return plan
        q = min(4 * q, p, LARGE_P)
        reach = min(reach, D[plan > 0].max().item() * (2 * min(D.shape)) ** (1 / q))


def _plan_within(a: Tensor, b: Tensor, D: Tensor, p: float, reach: float) -> Tensor:
    return _linear_program(a, b, (D.clamp_max(reach) / reach) ** p if reach else D)


def _bottleneck_plan(a: Tensor, b: Tensor, D: Tensor) -> Tensor:
    """A coupling whose longest move is shortest, by bisection over the distances that occur."""
    lengths = torch.unique(D)
    low = 0
    high = len(lengths) - 1
    plan = _linear_program(a, b, (lengths[high] < D).double())
    while low < high:
        middle = (low + high) // 2
        too_far = (lengths[middle] < D).double()
        trial = _linear_program(a, b, too_far)
        if (trial * too_far).max() <= NEGLIGIBLE:
            plan = trial
            high = middle
        else:
            low = middle + 1
    return torch.where(plan > NEGLIGIBLE, plan, 0.0)


def _linear_program(a: Tensor, b: Tensor, cost: Tensor) -> Tensor:
    import ot

    a = a / a.sum()
    b = b / b.sum()
    arrays = (np.ascontiguousarray(t.numpy()) for t in (a, b, cost))
    plan, log = ot.emd(*arrays, numItermax=10_000_000, log=True)
    if log["warning"] is not None:
        raise UserError(
            f"the transport problem of shape {tuple(cost.shape)} was not solved: {log['warning']}"
        )
    plan = torch.from_numpy(plan)
    return torch.where(plan > NEGLIGIBLE * torch.minimum(a[:, None], b[None]), plan, 0.0)


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
