"""The local Lipschitz constant of a map at an input: the norm of its Jacobian, in one call."""

from __future__ import annotations

import copy
import math
import re
import secrets
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope._checks import norm_name
from lipscope._types import UserError
from lipscope.linalg.differentiate import Map, check_input, jacobian
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.infinity import infinity_norm
from lipscope.linalg.operator import LinearOperator, Pair
from lipscope.linalg.spectral import Solver, fresh_seed, spectral_norm


def local_lipschitz(
    f: Map,
    X: Tensor,
    tol: float = 1e-6,
    *,
    norm: str | float = "2",
    precision: str = "native",
    gap: float | None = None,
    solver: Solver | None = None,
) -> Estimate | BatchEstimate:
    """||D_X f|| at X [n, d], or at each member of X [B, n, d]; see lipscope.local_lipschitz."""
    check_input(X)
    norm = norm_name(norm)
    if precision not in ("native", "exact"):
        raise UserError(
            f"precision must be 'native' (the dtype of X) or 'exact' (float64), got {precision!r}"
        )
    if precision == "exact":
        f, X = in_float64(f), X.double()
    try:
        J = jacobian(f, X)
        return infinity_norm(J) if norm == "inf" else spectral_norm(J, tol, gap=gap, solver=solver)
    except torch.OutOfMemoryError as error:
        # The frames of the error still hold everything, so this is what was in use when it came.
        held = torch.cuda.memory_allocated(X.device)
        total = torch.cuda.get_device_properties(X.device).total_memory
        raise UserError(too_large(X, str(error), held, total)) from error


def too_large(X: Tensor, message: str, held: int, total: int) -> str:
    """An error message: what was requested, what is available, and what to try."""
    tokens, asked = X.numel() // X.shape[-1], re.search(r"allocate ([\d.]+) ([KMG])iB", message)
    need = held + (float(asked[1]) * 1024 ** " KMG".index(asked[2]) if asked else 0)
    fitting = f": fewer than {int(tokens * total / need) + 1} could fit" if need > total else ""
    return (
        f"{tokens} tokens of size {X.shape[-1]} need more than the {total / 2**30:.3g} GiB of "
        f"{X.device}{fitting}; give fewer, or keep the Krylov vectors in the host's memory, "
        "solver=Solver(basis='host')"
    )


def in_float64(f: Map) -> Map:
    """The same map with its weights in float64; the caller's map is left alone."""
    if isinstance(f, torch.nn.Module):
        return copy.deepcopy(f).double()
    convert = getattr(f, "double", None)
    if convert is None:
        raise UserError(
            "precision='exact' needs a torch.nn.Module or a SelfAttention; "
            "for any other f convert its tensors and X to float64"
        )
    return convert()


def singular_triplets(
    J: LinearOperator, k: int, tol: float = 1e-8, *, solver: Solver | None = None
) -> list[Estimate] | list[BatchEstimate]:
    """The k largest singular triplets of an operator, repeated values included.

    They are found one after the other, each on J less what has been found: a single Krylov space
    shows each distinct value only once, and saturated attention repeats its largest.

    Args:
        J: The operator, or a batch of operators.
        k: Number of triplets, at most the smaller side of J.
        tol: Relative residual to reach for each triplet.
        solver: Options of the solver. Its failure probability is shared by the k upper bounds.

    Returns:
        k estimates in the order they were found. All k upper bounds hold together with the
        confidence that each of them states.

    Raises:
        UserError: If k is out of range.

    Example:
        >>> import torch, lipscope as ls
        >>> f = ls.SelfAttention(*(torch.eye(2, dtype=torch.float64) for _ in range(3)))
        >>> J = ls.jacobian(f, torch.zeros(3, 2, dtype=torch.float64))  # every token to the mean
        >>> [round(e.value, 6) for e in ls.singular_triplets(J, 2)]
        [1.0, 1.0]
    """
    if not 1 <= k <= min(J.in_size, J.out_size):
        raise UserError(
            f"k must be between 1 and {min(J.in_size, J.out_size)}, the smaller side of J, "
            f"got {k!r}"
        )
    solver = solver or Solver()
    # The vectors found so far depend on their starts, so every search needs a start of its own.
    first = secrets.randbits(63) if solver.seed is None else solver.seed
    found: list[Any] = []
    blur: Any = 0.0
    least: Any = math.inf
    for i in range(k):
        seed = fresh_seed(first, f"triplet {i}")
        own = replace(solver, seed=seed, failure=solver.failure / k)
        e: Any = spectral_norm(_deflated(J, found), tol, solver=own)
        # Deflation with vectors of residual r moves the rest by at most r sigma. Vectors that were
        # found out of order span a space on which J is at least the smallest of their values, less
        # what their residuals mix.
        mixed = blur + 2 * e.residual * e.value
        least = _smaller(least, e.lower)
        lower = e.lower if not found else _positive(least - mixed)
        confidence = 1 - solver.failure if e.confidence else 0.0
        found.append(replace(e, lower=lower, upper=e.upper + blur, confidence=confidence))
        blur = mixed
    return found


def _smaller(x: Any, y: Any) -> Any:
    return torch.minimum(torch.as_tensor(x), y) if isinstance(y, Tensor) else min(x, y)


def _positive(x: Any) -> Any:
    return x.clamp_min(0.0) if isinstance(x, Tensor) else max(x, 0.0)


def _deflated(J: LinearOperator, found: list[Any]) -> LinearOperator:
    """(I - U U') J (I - V V') for the vectors found so far."""
    if not found:
        return J

    def without(x: Tensor, vectors: list[Tensor]) -> Tensor:
        for v in vectors:
            inner = tuple(range(len(J.leading), x.ndim))
            x = x - (x * v).sum(dim=inner, keepdim=True) * v
        return x

    left, right = [e.left for e in found], [e.right for e in found]

    def deflated(pair: Pair) -> Pair:
        mv, rmv = pair
        return lambda E: without(mv(without(E, right)), left), lambda U: without(
            rmv(without(U, left)), right
        )

    mv, rmv = deflated((J.mv, J.rmv))
    perturbed = J.perturbed
    return LinearOperator(
        mv=mv,
        rmv=rmv,
        in_shape=J.in_shape,
        out_shape=J.out_shape,
        batch=J.batch,
        dtype=J.dtype,
        device=J.device,
        condition=J.condition,
        worst=J.worst,
        # What was taken out was of the size of the largest: rounding still is.
        size=found[0].value if J.size is None else J.size,
        perturbed=None if perturbed is None else lambda i: deflated(perturbed(i)),
    )
