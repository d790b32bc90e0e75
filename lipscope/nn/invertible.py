"""Invertible residuals y = x + g(x) with g a contraction: inverse and log-determinant."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lipscope._ambient import entry_point, unaffected
from lipscope._checks import check_positive, name_bad_argument, norm_name
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.linalg.differentiate import check_input
from lipscope.linalg.operator import lengths
from lipscope.linalg.rounding_noise import (
    DRAWS,
    WIDENED,
    RoundingNoise,
    UnseenRoundingError,
)
from lipscope.nn.attention_layer import AttentionLayer, check_padding
from lipscope.nn.contractive import ContractiveL2Attention, ContractiveMLP
from lipscope.nn.parametrize import SpectralNormalised
from lipscope.nn.wrapped import unwrapped

ROUNDING = 64
"""Accuracy of one evaluation of g that the iteration assumes, in units in the last place of its
input; the error bound does not rest on it."""

MOST_TERMS = 256
"""Terms of a log-determinant that are summed without being asked for: each is a backward pass."""

ROULETTE_TERMS = 8
"""Terms that every probe of an unbiased estimate sums by default."""

PROVED = (ContractiveL2Attention, ContractiveMLP)
"""Layers whose constant is a theorem: what seems to contradict it is rounding."""


@dataclass(frozen=True, eq=False)
class Inverse(Displayed):
    """The solution x of x + g(x) = y, with an error bound.

    Attributes:
        value: The solution, of the shape of y.
        error_bound: Upper bound on its distance from the exact solution, in the norm of g, one
            number per sequence.
        steps: Number of fixed-point steps, per sequence.
        noisy: True where rounding errors in g ended the iteration early, as they may for tokens
            close to each other and far from the rest. error_bound accounts for this and is larger
            then; float64 makes it smaller.
    """

    value: Tensor
    error_bound: Tensor
    steps: Tensor
    noisy: Tensor


@dataclass(frozen=True, eq=False)
class LogDet(Displayed):
    """An estimate of log |det D(x + g(x))|.

    Attributes:
        value: The estimate, one number per sequence.
        standard_error: Estimated from the spread of the random probes; NaN for a single probe.
        remainder: Upper bound on the truncation error of the series; 0 for an unbiased estimate.
        terms: Number of terms that were summed, by every probe if unbiased.
        terms_needed: Number of terms with a remainder of at most `tol`.
    """

    value: Tensor
    standard_error: Tensor
    remainder: float
    terms: int
    terms_needed: int


class InvertibleResidual(nn.Module):
    """The residual y = x + g(x), invertible because g has a Lipschitz constant below 1.

    Tokens are [n, d] or a batch [B, n, d] whose members g maps independently. The constant is that
    of g in its norm (g.norm if it has one, else "2"); the residual itself has 1 + constant, so
    residuals are composed in sequence, not nested. If g is attention, padding [n] or [B, n] is True
    for real tokens, and padded tokens are returned unchanged.

    Args:
        g: The contraction.
        constant: Upper bound on the Lipschitz constant of g, below 1; g.constant by default.

    Raises:
        UserError: If g is not a module or has no constant below 1.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> g = ls.nn.ContractiveL2Attention(8, heads=2, constant=0.5)
        >>> residual = ls.nn.InvertibleResidual(g).double()
        >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(5, 8)
        >>> inverse = residual.inverse(residual(x))
        >>> bool((inverse.value - x).norm() <= inverse.error_bound)
        True
    """

    @name_bad_argument
    def __init__(self, g: nn.Module, constant: float | None = None) -> None:
        super().__init__()
        _check_map(g)
        self.g = g
        self.given = constant
        norm = getattr(g, "norm", "2")
        # A g may also have a layer of that name.
        self.norm = norm_name(norm) if isinstance(norm, str | int | float) else "2"
        _check_contraction(g, constant)

    @property
    @unaffected
    def constant(self) -> float:
        """The bound on the Lipschitz constant of g, read from g each time, as it may change."""
        _check_contraction(self.g, self.given)
        # The check has made sure that g.constant is a number.
        return float(self.g.constant if self.given is None else self.given)  # type: ignore[arg-type]

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return x + _at(self.g, padding)(x)

    @entry_point
    @torch.no_grad()
    def inverse(self, y: Tensor, padding: Tensor | None = None) -> Inverse:
        """Solve x + g(x) = y by the fixed-point iteration x <- y - g(x), starting from x = y.

        It runs to the resolution of the dtype, in at most as many steps as Banach's estimate asks
        for. error_bound is ||y - x - g(x)|| / (1 - constant) with the residual evaluated in
        float64, so it includes rounding; the rounding of g in float64 is measured, and infinite if
        part of g cannot be.

        Args:
            y: Tokens [n, d] or [B, n, d].
            padding: True for real tokens, [n] or [B, n], if g is attention.

        Returns:
            The solution with its error bound.

        Raises:
            UserError: If g turns out not to be a contraction with this constant.
        """
        real = _with_padding_zero(y, padding)
        check_input(real)
        found = self._fixed_point(self._as_fine_as_g(real), padding)
        if padding is None:
            return found
        return replace(found, value=found.value.where(padding[..., None], y))

    def _as_fine_as_g(self, x: Tensor) -> Tensor:
        """x in the dtype of the weights, if that is finer than 16 bits."""
        for weight in self.g.parameters():
            return x.to(torch.promote_types(x.dtype, weight.dtype)) if x.element_size() == 2 else x
        return x

    def _fixed_point(self, y: Tensor, padding: Tensor | None) -> Inverse:
        c = self.constant
        g = _at(self.g, padding)
        x = y - g(y)
        if not bool(x.isfinite().all()):
            raise UserError("g gives values that are not finite at y; look for NaN in its weights")
        step = _length(x - y, self.norm)
        goal = torch.finfo(y.dtype).eps * (_length(y, self.norm) + step)
        allowed = theory_steps(c, step, goal)
        steps = torch.ones_like(step, dtype=torch.long)
        active = (c / (1 - c) * step > goal) & (steps < allowed)
        noisy = torch.zeros_like(active)
        while bool(active.any()):
            new = y - g(x)
            moved = _length(new - x, self.norm)
            # A contraction shortens every step; a longer one is rounding, or a wrong constant.
            far = active & ~(moved <= (1 + 1e-3) * c * step + ROUNDING * goal)
            if bool(far.any()):
                self._check_promise(far, x, step, moved, g)
                noisy = noisy | far
                active = active & ~far
            x = torch.where(active[..., None, None], new, x)
            steps = steps + active
            # Within rounding of the goal, a step that is no shorter than the last one is noise.
            lost = (moved >= step) & (step <= ROUNDING * goal)
            step = torch.where(active, moved, step)
            active = active & ~lost & (c / (1 - c) * step > goal) & (steps < allowed)
        return Inverse(
            value=x,
            error_bound=self._residual(x, y, padding) / (1 - c),
            steps=steps,
            noisy=noisy,
        )

    def _check_promise(
        self, far: Tensor, x: Tensor, step: Tensor, moved: Tensor, g: Callable[[Tensor], Tensor]
    ) -> None:
        """Raise UserError if a step contradicts the constant of g beyond what rounding explains."""
        if isinstance(unwrapped(self.g), PROVED):
            return
        broken = far & ~(moved <= self.constant * step + _noise(g, x, self.norm))
        if bool(broken.any()):
            raise UserError(
                f"g is not a contraction with constant {self.constant:g}: two points "
                f"{step[broken].max():.3g} apart have images {moved[broken].max():.3g} apart, and "
                "rounding does not explain it; give a constant that bounds g, or a g that has one"
            )

    def _residual(self, x: Tensor, y: Tensor, padding: Tensor | None) -> Tensor:
        x = x.double()
        y = y.double()
        g = _at(copy.deepcopy(self.g).double(), padding)
        # Two subtractions; what g itself rounds is measured.
        size = _length(x, self.norm) + _length(y, self.norm)
        rounding = 8 * torch.finfo(torch.float64).eps * size
        return _length(y - x - g(x), self.norm) + rounding + _noise(g, x, self.norm)

    @entry_point
    def log_det(
        self,
        x: Tensor,
        terms: int | None = None,
        probes: int = 4,
        unbiased: bool = False,
        padding: Tensor | None = None,
        *,
        tol: float = 0.01,
    ) -> LogDet:
        """Estimate log det(I + J) = tr J - tr J^2 / 2 + tr J^3 / 3 - ..., where J = D_x g.

        Traces are estimated by v'Jv over random sign vectors v. The estimate is differentiable in x
        and in the weights of g.

        Args:
            x: Tokens [n, d] or [B, n, d].
            terms: Number of terms that are always summed; the rest is bounded by theory. Default:
                as many as `tol` needs, at most 256; 8 if unbiased.
            probes: Number of sign vectors; the standard error needs two.
            unbiased: Continue after `terms` for a random number of terms, each weighted by the
                inverse of its probability (Chen et al. 2019, Russian roulette): no remainder, more
                variance.
            padding: True for real tokens, [n] or [B, n], if g is attention.
            tol: Largest remainder by default, in nats.

        Returns:
            The estimate with its standard error and its remainder, and how many terms `tol` needs.
        """
        x = _with_padding_zero(x, padding)
        check_input(x)
        check_positive("tol", tol)
        needed = terms_for(self.constant, x.shape[-2] * x.shape[-1], tol)
        if terms is None:
            terms = ROULETTE_TERMS if unbiased else min(needed, MOST_TERMS)
        for name, value in (("terms", terms), ("probes", probes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a positive integer, got {value!r}")
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            x = self._as_fine_as_g(x)
            signs = torch.randint(0, 2, (probes, *x.shape), device=x.device).to(x.dtype) * 2 - 1
            weights = series_weights(terms, probes, self.constant if unbiased else 0.0).to(x)
            if padding is not None:
                padding = padding.expand(probes, *padding.shape).reshape(-1, padding.shape[-1])
            found = power_series(_at(self.g, padding), x, signs, weights, keep)
        spread = (
            found.detach().std(dim=0) / math.sqrt(probes)
            if probes > 1
            else torch.full_like(found[0], math.nan)
        )
        lost = 0.0 if unbiased else remainder(self.constant, terms, x.shape[-2] * x.shape[-1])
        return LogDet(
            value=found.mean(dim=0),
            standard_error=spread.detach(),
            remainder=lost,
            terms=terms,
            terms_needed=needed,
        )

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}, norm={self.norm}"


def remainder(constant: float, terms: int, size: int) -> float:
    """size c^(m+1) / ((m+1) (1-c)) >= sum_{k>m} |tr J^k| / k, since |tr J^k| <= size c^k."""
    return size * constant ** (terms + 1) / ((terms + 1) * (1 - constant))


def terms_for(constant: float, size: int, tol: float) -> int:
    """Return the smallest number of terms whose remainder is at most tol."""
    # The remainder falls with the number of terms: bracket, then bisect.
    high = 1
    while remainder(constant, high, size) > tol:
        high *= 2
    return bisect_left(range(high), True, 1, key=lambda m: remainder(constant, m, size) <= tol)


def power_series(
    g: Callable[[Tensor], Tensor], x: Tensor, signs: Tensor, weights: Tensor, keep: bool
) -> Tensor:
    """sum_k weights[k] v'J^k v with J = D_x g, for every v in signs: [probes] or [probes, B].

    signs is [probes, *x.shape]. keep: whether the result is differentiable.
    """
    # Every probe gets its own copy of x in one batch: a term costs one backward pass for all.
    many = (x if keep else x.detach()).expand_as(signs).reshape(-1, *x.shape[-2:])
    many = many if many.requires_grad else many.requires_grad_(True)
    y = g(many)
    v = w = signs.reshape(many.shape)
    total = torch.zeros(signs.shape[:-2], dtype=x.dtype, device=x.device)
    for weight in weights:
        if not y.requires_grad:  # g does not depend on x
            break
        (w,) = torch.autograd.grad(
            y, many, w, create_graph=keep, retain_graph=True, materialize_grads=True
        )
        inner = (w * v).sum(dim=(-2, -1)).reshape(total.shape)
        total = total + weight.reshape(-1, *[1] * (total.ndim - 1)) * inner
    return total


def series_weights(terms: int, probes: int, going_on: float) -> Tensor:
    """(-1)^(k+1) / k for `terms` terms, [k, probes], and a tail of random length for each probe.

    The tail continues with probability going_on after each term. Its j-th term is divided by
    going_on^j, the probability of reaching it, which keeps the sum unbiased.
    """
    tails = torch.zeros(probes, dtype=torch.long)
    walking = torch.rand(probes, dtype=torch.float32) < going_on
    while bool(walking.any()):
        tails += walking
        walking = walking & (torch.rand(probes, dtype=torch.float32) < going_on)
    k = torch.arange(1, terms + int(tails.max()) + 1, dtype=torch.float64)[:, None]
    late = (k - terms).clamp_min(0)
    return torch.where(late <= tails, (-1.0) ** (k + 1) / k / (going_on or 1.0) ** late, 0.0)


def _at(g: nn.Module, padding: Tensor | None) -> Callable[[Tensor], Tensor]:
    """g with the padding bound, if there is any."""
    if padding is None:
        return g
    if not isinstance(unwrapped(g), AttentionLayer):
        raise UserError(
            f"padding is for attention, and g is a {type(g).__name__}; leave padding out for maps "
            "that treat each token separately"
        )
    return lambda x: g(x, padding)


def _with_padding_zero(x: Tensor, padding: Tensor | None) -> Tensor:
    """x with padded tokens set to zero, whatever they contain."""
    if padding is None:
        return x
    check_padding(padding, x)
    return x.masked_fill(~padding[..., None], 0)


def _noise(g: Callable[[Tensor], Tensor], x: Tensor, norm: str) -> Tensor:
    """Rounding error of g at x per sequence: how far it moves when every operation does, widened.

    Infinite if g computes where that cannot be seen.
    """
    here = g(x)
    largest = torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
    try:
        for i in range(DRAWS):
            with RoundingNoise(i) as mode:
                moved = g(x)
            mode.check_nothing_left_torch(g, x)
            largest = torch.maximum(largest, _length(moved - here, norm))
    except UnseenRoundingError:
        return torch.full_like(largest, math.inf)
    return WIDENED * largest


def theory_steps(constant: float, first: Tensor, goal: Tensor) -> Tensor:
    """The least k with constant^k / (1 - constant) first <= goal: Banach's a priori estimate."""
    ratio = (first / (goal * (1 - constant))).double().clamp_min(1.0)
    return torch.ceil(ratio.log() / -math.log(constant)).clamp_min(1).long()


def _length(x: Tensor, norm: str) -> Tensor:
    """The norm of each sequence in float64, scaled so that squares neither overflow nor vanish."""
    flat = x.flatten(-2).double()
    return flat.abs().amax(dim=-1) if norm == "inf" else lengths(flat)


def _check_map(g: nn.Module) -> None:
    if not isinstance(g, nn.Module):
        raise UserError(
            "g must be a torch.nn.Module, so that it can also be evaluated in float64, "
            f"got {type(g).__name__}; wrap it in a module"
        )
    inner = unwrapped(g)
    if isinstance(inner, InvertibleResidual):
        raise UserError(
            f"g is a residual x + g(x), not a contraction: its constant is {1 + inner.constant:g}, "
            f"that of its own g is {inner.constant:g}; compose residuals in sequence, "
            "torch.nn.Sequential(first, second)"
        )
    if isinstance(inner, SpectralNormalised):
        raise UserError(
            "g is a parametrization of weights, whose constant is the norm of a matrix; "
            "give the layer that has these weights"
        )


def _check_contraction(g: nn.Module, constant: float | None) -> None:
    """Raise UserError, with a remedy, unless g has a constant below 1."""
    own = getattr(g, "constant", None)
    name = type(g).__name__
    if constant is None and own is None:
        raise UserError(
            f"{name} states no Lipschitz constant; give InvertibleResidual(g, constant=...) a "
            "bound below 1, or a g that has one, such as "
            "ContractiveL2Attention(dim, heads, constant=0.9)"
        )
    chosen = own if constant is None else constant
    if isinstance(chosen, bool) or not isinstance(chosen, int | float) or not 0 < chosen < 1:
        raise UserError(
            f"x + g(x) inverts if constant lies strictly between 0 and 1, got {chosen!r}"
        )
    if isinstance(own, int | float) and chosen < own:
        raise UserError(
            f"constant={chosen:g} is below the constant {own:g} that {name} states; "
            "leave it out, or give a larger one"
        )
    layer = unwrapped(g)
    if own is None and isinstance(layer, AttentionLayer):
        bound = layer.lipschitz_bound(2)
        why = (
            "has no Lipschitz constant for any weights"
            if bound == math.inf
            else f"guarantees no constant: with its current weights the bound is {bound:.3g} at 2 "
            "tokens, and it is larger for more tokens or other weights"
        )
        raise UserError(
            f"{type(layer).__name__} {why}; use "
            f"ContractiveL2Attention({layer.dim}, {layer.heads}, constant=0.9)"
        )
