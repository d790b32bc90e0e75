"""The local Lipschitz constant at tokens or at a measure, with or without mass splitting."""

from __future__ import annotations

from torch import Tensor

from lipscope._types import UserError
from lipscope.linalg import local
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field import duplication
from lipscope.mean_field.attention_on_measures import derivative, liftable
from lipscope.mean_field.measures import DiscreteMeasure, as_measure


def local_lipschitz(
    f: Map,
    X: Tensor | DiscreteMeasure,
    tol: float = 1e-6,
    *,
    norm: str | float = "2",
    precision: str = "native",
    gap: float | None = None,
    solver: Solver | None = None,
    splitting: bool = False,
) -> Estimate | BatchEstimate:
    """Compute the local Lipschitz constant of a map at an input, `||D_X f||`.

    The largest singular value of the Jacobian is found without forming a matrix, with a lower and
    an upper bound.

    Args:
        f: A `SelfAttention` layer, or any map from tokens to tokens, such as a `torch.nn.Module`.
        X: Tokens of shape `[n, d]`; a batch of shape `[B, n, d]`, solved together; or a
            `DiscreteMeasure`, where the constant is that of `mean_field.derivative`.
        tol: Relative residual at which the solver stops.
        norm: "2" (Frobenius norm of all tokens), or at tokens "inf", the infinity-norm of the
            vectorised map.
        precision: "native" works in the dtype of `X`; "exact" recomputes in float64, the only
            precision with an upper bound.
        gap: If given, keep iterating until `upper / lower - 1` is at most this.
        solver: Options of the solver.
        splitting: Whether copies of a token may move apart. Left and right vectors are then fields
            on two copies of every atom.

    Returns:
        The constant with its bounds, status and singular vectors; for a batch, one per member.

    Raises:
        UserError: If the input or an option is invalid, or `f` cannot be differentiated.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> f = ls.SelfAttention(I, I, 3 * I)
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> e = ls.local_lipschitz(f, X)
        >>> e.lower <= e.value <= e.upper
        True
        >>> round(e.value, 3), e.status.ok
        (4.056, True)
    """
    if isinstance(X, Tensor) and not splitting:
        return local.local_lipschitz(
            f, X, tol, norm=norm, precision=precision, gap=gap, solver=solver
        )
    if norm not in ("2", 2):
        raise UserError(
            f"norm must be '2' (L2 of the measure) on measures and with splitting, got {norm!r}"
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
