"""The local Lipschitz constant of a map at tokens or at a measure, in one call."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lipscope._ambient import entry_point, live_modules
from lipscope._checks import norm_name
from lipscope._types import Status, UserError
from lipscope.linalg.differentiate import Map, check_input, jacobian, not_finite_in
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.operator import LinearOperator, Product, lengths
from lipscope.linalg.rounding_noise import DRAWS, UNITS, WIDENED, UnseenRoundingError
from lipscope.linalg.spectral import Solver, spectral_norm

EXACT = "largest absolute row sum, all rows; the interval is rounding"
SEEN = (
    f", measured and not proved: every row again, with every operation moved by up to {UNITS} "
    f"units in the last place, the change widened {WIDENED} times"
)
UNKNOWN = "largest absolute row sum, all rows; no bounds: {why}"
COARSE = "rounding in {dtype} is not known; use precision='exact' or float64 inputs"

BLOCK = 1 << 22
"""Numbers in one batch of rows."""


@runtime_checkable
class Measure(Protocol):
    """A point that is not a tensor and differentiates maps itself, as a `DiscreteMeasure` does."""

    def jacobian_of(self, f: Any) -> LinearOperator: ...

    def split_constant_of(
        self, f: Any, tol: float, gap: float | None, solver: Solver | None
    ) -> Estimate:
        """Return the constant if copies of a token may move apart."""
        ...

    def double(self) -> Measure: ...


@entry_point
def local_lipschitz(
    f: Map,
    X: Tensor | Measure,
    tol: float = 1e-6,
    *,
    norm: str | float = "2",
    precision: str = "native",
    gap: float | None = None,
    solver: Solver | None = None,
    splitting: bool = False,
    mesh: DeviceMesh | ProcessGroup | None = None,
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
        mesh: If given, the processes that solve together, for a `SelfAttention` or its
            `heads_apart()`. X and the vectors of the result are then this process's tokens
            (`lipscope.attention.sharded.shard`); all numbers are the same on every process.

    Returns:
        The constant with its bounds, status and singular vectors: for tokens [n, d] or a measure
        an :class:`Estimate` of plain numbers, for [B, n, d], B = 1 included, a
        :class:`BatchEstimate` of tensors [B], whose `[i]` is the Estimate of member i.

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
    if norm != "2":
        norm = norm_name(norm)
    if precision not in ("native", "exact"):
        raise UserError(
            f"precision must be 'native' (the dtype of X) or 'exact' (float64), got {precision!r}"
        )
    if not isinstance(X, Tensor | Measure):
        raise UserError(
            f"X must be a tensor of tokens [n, d] or [B, n, d], got {type(X).__name__}; "
            "torch.as_tensor makes one of an array"
        )
    if not isinstance(X, Tensor) or splitting:
        if norm != "2":
            raise UserError(
                f"norm must be '2' (L2 of the measure) on measures and with splitting, got {norm!r}"
            )
        if mesh is not None:
            raise UserError("mesh spreads tokens, not measures, and no splitting; omit mesh")
        return _at_measure(f, X, tol, precision, gap, solver, splitting)
    if mesh is None:
        check_input(X)
    elif norm != "2":
        raise UserError(f"mesh solves for norm='2' only, got norm={norm!r}; omit mesh")
    elif not hasattr(f, "jacobian_on"):
        raise UserError(
            f"mesh spreads the tokens of a SelfAttention or of its heads_apart(), "
            f"and f is {type(f).__name__}, which is not known to act token by token otherwise; "
            "omit mesh, or measure its attention alone"
        )
    dtype = torch.float64 if precision == "exact" else X.dtype
    # Numbers in low precision are exact in float64, and a row costs as many products there: closed
    # forms need no statement about the rounding of low precision.
    rows_in_float64 = norm == "inf" and hasattr(f, "jacobian") and hasattr(f, "double")
    if precision == "exact" or rows_in_float64:
        f = in_float64(f)
        X = X.double()
    layer: Any = f
    try:
        J = jacobian(f, X) if mesh is None else layer.jacobian_on(X, mesh)
        e = infinity_norm(J) if norm == "inf" else spectral_norm(J, tol, gap=gap, solver=solver)
    except torch.OutOfMemoryError as error:
        # The frames of the error still hold everything, so this is what was in use when it came.
        held = torch.cuda.memory_allocated(X.device)
        total = torch.cuda.get_device_properties(X.device).total_memory
        raise UserError(too_large(X, str(error), held, total)) from error
    failed = Status.NON_FINITE in ((e.status,) if isinstance(e, Estimate) else e.status)
    by_autograd = mesh is None and not hasattr(f, "jacobian")
    if failed and by_autograd and (why := not_finite_in(f, X)):
        e = replace(e, note=f"no bounds: {why}")
    return replace(e, left=e.left.to(dtype), right=e.right.to(dtype))


def _at_measure(
    f: Any,
    X: Tensor | Measure,
    tol: float,
    precision: str,
    gap: float | None,
    solver: Solver | None,
    splitting: bool,
) -> Estimate | BatchEstimate:
    """The constant on L2(mu); tokens stand for their uniform measure."""
    if isinstance(X, Tensor):
        if not hasattr(f, "measure_of"):
            raise UserError(f"f must be a SelfAttention to act on measures, got {type(f).__name__}")
        X = f.measure_of(X)
    assert isinstance(X, Measure)
    if precision == "exact":
        X = X.double()
        f = in_float64(f) if hasattr(f, "double") else f  # any other f is refused by the measure
    if splitting:
        return X.split_constant_of(f, tol, gap, solver)
    return spectral_norm(X.jacobian_of(f), tol, gap=gap, solver=solver)


def too_large(X: Tensor, message: str, held: int, total: int) -> str:
    """An error message: what was requested, what is available, and what to try."""
    tokens = X.numel() // X.shape[-1]
    asked = re.search(r"allocate ([\d.]+) ([KMG])iB", message)
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
        with live_modules:
            return copy.deepcopy(f).double()
    convert = getattr(f, "double", None)
    if convert is None:
        raise UserError(
            "precision='exact' needs a torch.nn.Module or a SelfAttention; "
            "for any other f convert its tensors and X to float64"
        )
    return convert()


def infinity_norm(J: LinearOperator) -> Estimate | BatchEstimate:
    """max_i sum_j |J_ij|, the norm of J for the largest coordinate, by one product per row.

    right is the sign vector that attains it and left the unit vector of that row.
    """
    members = J.batch or 1
    repeated, unknown = _repetitions(J)
    best = torch.full((members,), -1.0, dtype=torch.float64)
    # The largest sums of any row less its rounding, and with it.
    low, high, longest = torch.zeros(3, members, dtype=torch.float64)
    which = torch.zeros(members, dtype=torch.long)
    right = torch.zeros(members, J.in_size, dtype=J.dtype, device=J.device)
    # A product with attention holds tokens^2 weights.
    tokens = max((shape[0] for shape in (J.in_shape, J.out_shape) if len(shape) > 1), default=1)
    size = max(1, BLOCK // (members * max(J.in_size, J.out_size, tokens**2)))
    for start in range(0, J.out_size, size):
        index = torch.arange(start, min(start + size, J.out_size), device=J.device)
        rows = _rows(J, J.rmv, index)  # [rows, members, in_size]
        sums = rows.double().abs().sum(dim=-1).cpu()
        spread = torch.zeros_like(sums)
        for rmv in repeated:
            moved = (_rows(J, rmv, index) - rows).double().abs().sum(dim=-1).cpu()
            spread = torch.maximum(spread, moved.nan_to_num(torch.inf, torch.inf))
        longest = torch.maximum(longest, lengths(rows.double()).amax(dim=0).cpu())
        low = torch.maximum(low, (sums - WIDENED * spread).nan_to_num().amax(dim=0))
        high = torch.maximum(high, (sums + WIDENED * spread).nan_to_num(torch.inf).amax(dim=0))
        top, at = sums.nan_to_num(nan=math.inf).max(dim=0)
        for m in torch.nonzero(top > best)[:, 0].tolist():
            best[m], which[m] = sums[at[m], m], start + at[m]
            right[m] = torch.where(rows[at[m], m] < 0, -1.0, 1.0).to(J.dtype)
    # A row is off by at most the rounding of ||J||_2 in length, hence by sqrt(in_size) times that
    # in its sum.
    stated = J.error(longest * math.sqrt(J.out_size)) * math.sqrt(J.in_size)
    known = best.isfinite() & stated.isfinite() & high.isfinite() & (not unknown)
    left = torch.zeros(members, J.out_size, dtype=J.dtype, device=J.device)
    left[torch.arange(members), which] = 1
    many = BatchEstimate(
        value=torch.where(best.isfinite(), best, torch.nan),
        lower=torch.where(known, (low - stated).clamp_min(0), 0.0),
        upper=torch.where(known, high + stated, torch.inf),
        residual=torch.zeros_like(best),
        steps=torch.full_like(best, J.out_size),
        status=tuple(
            Status.CONVERGED if ok else Status.IMPRECISE if x.isfinite() else Status.NON_FINITE
            for x, ok in zip(best, known, strict=True)
        ),
        left=left.reshape(-1, *J.out_shape),
        right=right.reshape(-1, *J.in_shape),
        confidence=1.0 if known.any() else 0.0,
        note=UNKNOWN.format(why=unknown) if unknown else EXACT + SEEN if repeated else EXACT,
    )
    return many if J.batch is not None else many[0]


def _repetitions(J: LinearOperator) -> tuple[list[Product], str]:
    """J' with its rounding moved, for maps that state none; and why rounding is unknown, if so."""
    if J.is_compared:
        return [], COARSE.format(dtype=str(J.dtype).removeprefix("torch."))
    if J.rounding.perturbed is None:
        return [], ""
    try:
        return [J.rounding.perturbed(i)[1] for i in range(DRAWS)], ""
    except torch.OutOfMemoryError:
        return [], "no memory to repeat it"
    except UnseenRoundingError as error:
        return [], f"rounding inside the map is not known ({error})"


def _rows(J: LinearOperator, rmv: Product, index: Tensor) -> Tensor:
    """Rows of J, [len(index), members, in_size], by one vectorised product with its adjoint."""
    units = torch.zeros(len(index), J.out_size, dtype=J.dtype, device=J.device)
    units[torch.arange(len(index)), index] = 1
    units = units.reshape(len(index), *[1 for _ in J.leading], *J.out_shape)
    units = units.expand(len(index), *J.leading, *J.out_shape)
    return torch.func.vmap(rmv)(units).reshape(len(index), J.batch or 1, J.in_size)
