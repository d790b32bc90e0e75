"""The local Lipschitz constant at tokens or at a measure, with or without mass splitting."""

from __future__ import annotations

from torch import Tensor

from lipscope._types import UserError
from lipscope.linalg import local
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import Estimate
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field import duplication
from lipscope.mean_field.attention_on_measures import derivative, liftable
from lipscope.mean_field.measures import DiscreteMeasure, as_measure


def local_lipschitz(
    f: Map,
    X: Tensor | DiscreteMeasure,
    tol: float = 1e-6,
    *,
    norm: str = "2",
    precision: str = "native",
    gap: float | None = None,
    solver: Solver | None = None,
    splitting: bool = False,
) -> Estimate:
    """||D_X f||_2 at tokens X [n, d] or [B, n, d], or ||D_mu F|| at a measure, with the vectors of `derivative`.

    norm:      "2", or at tokens "inf", the infinity-norm of the vectorised map.
    precision: "native" works in the dtype of X; "exact" recomputes in float64, which alone gives an upper bound.
    splitting: the constant when copies of a token may move apart; its vectors are fields on two copies of every atom.
    """
    if isinstance(X, Tensor) and not splitting:
        return local.local_lipschitz(
            f, X, tol, norm=norm, precision=precision, gap=gap, solver=solver
        )
    if norm != "2":
        raise UserError(
            f"on measures, and with splitting, the norm is '2' (L2 of the measure), got {norm!r}"
        )
    if precision not in ("native", "exact"):
        raise UserError(f"precision must be 'native' or 'exact' (float64), got {precision!r}")
    layer = liftable(f)
    mu = as_measure(X, layer.causal)
    if precision == "exact":
        layer, mu = layer.double(), mu.double()
    if splitting:
        return duplication.split_estimate(
            duplication.splitting(layer, mu, tol, gap=gap, solver=solver)
        )
    return spectral_norm(derivative(layer, mu), tol, gap=gap, solver=solver)
