"""Residuals that invert: y = x + g(x) with g a contraction, its inverse by fixed point and its log-determinant."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lipscope._types import UserError
from lipscope.linalg.differentiate import check_input
from lipscope.nn.attention_layer import AttentionLayer, check_padding

ROUNDING = 64
"""How many units in the last place of its input one evaluation of g is trusted to."""


@dataclass(frozen=True, eq=False)
class Inverse:
    """x with x + g(x) = y: how far it can be from the true one (a number a sequence, in the norm of g), and steps."""

    value: Tensor
    error_bound: Tensor
    steps: Tensor


@dataclass(frozen=True, eq=False)
class LogDet:
    """log |det D(x + g(x))|, a number a sequence.

    standard_error: of the random probes, estimated from their spread; NaN for a single probe.
    remainder:      at most this much is lost by ending the series; 0 for an unbiased estimate.
    """

    value: Tensor
    standard_error: Tensor
    remainder: float


class InvertibleResidual(nn.Module):
    """y = x + g(x), where g has Lipschitz constant at most `constant` < 1 in its norm (g.norm, else 2).

    Tokens are [n, d] or a batch [B, n, d] whose members g treats apart. constant is g.constant where it is omitted.
    padding, [n] or [B, n], True for real tokens, is for a g that is attention; padded tokens come out as they went in.
    """

    def __init__(self, g: nn.Module, constant: float | None = None) -> None:
        super().__init__()
        self.g = g
        self.constant = _contraction(g, constant)
        norm = getattr(g, "norm", 2)
        self.norm: float = norm if isinstance(norm, int | float) and norm in (2, math.inf) else 2

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return x + _at(self.g, padding)(x)

    @torch.no_grad()
    def inverse(self, y: Tensor, padding: Tensor | None = None) -> Inverse:
        """x = y - g(x), repeated from x = y down to the resolution of the dtype, in no more steps than theory asks.

        error_bound is ||y - x - g(x)|| / (1 - constant) with the residual taken in float64, so rounding is inside it.
        """
        real = _real(y, padding)
        check_input(real)
        with torch.autocast(y.device.type, enabled=False):  # which would round g to less than y has
            found = self._fixed_point(self._as_fine_as_g(real), padding)
        return found if padding is None else replace(found, value=found.value.where(padding[..., None], y))

    def _as_fine_as_g(self, x: Tensor) -> Tensor:
        """Tokens that autocast made coarser than the weights are."""
        for weight in self.g.parameters():
            return x.to(torch.promote_types(x.dtype, weight.dtype)) if x.element_size() == 2 else x
        return x

    def _fixed_point(self, y: Tensor, padding: Tensor | None) -> Inverse:
        c, g = self.constant, _at(self.g, padding)
        x = y - g(y)
        if not bool(x.isfinite().all()):
            raise UserError("g gives values that are not finite at y; look for NaN in its weights")
        step = _length(x - y, self.norm)
        goal = torch.finfo(y.dtype).eps * (_length(y, self.norm) + step)
        allowed, steps = theory_steps(c, step, goal), torch.ones_like(step, dtype=torch.long)
        active = (c / (1 - c) * step > goal) & (steps < allowed)
        while bool(active.any()):
            new = y - g(x)
            moved = _length(new - x, self.norm)
            if bool((active & ~(moved <= (1 + 1e-3) * c * step + ROUNDING * goal)).any()):
                raise UserError(
                    f"g is no contraction with constant {c:g}: two points {step[active].max():.3g} apart have images "
                    f"{moved[active].max():.3g} apart; give a constant that bounds it, or a g that has one"
                )
            x = torch.where(active[..., None, None], new, x)
            steps = steps + active
            # Within rounding of the goal, a step that is no shorter than the last one is noise.
            lost = (moved >= step) & (step <= ROUNDING * goal)
            step = torch.where(active, moved, step)
            active = active & ~lost & (c / (1 - c) * step > goal) & (steps < allowed)
        return Inverse(x, self._residual(x, y, padding) / (1 - c), steps)

    def _residual(self, x: Tensor, y: Tensor, padding: Tensor | None) -> Tensor:
        x, y = x.double(), y.double()
        g = _at(copy.deepcopy(self.g).double(), padding)
        rounding = ROUNDING * torch.finfo(torch.float64).eps * (_length(x, self.norm) + _length(y, self.norm))
        return _length(y - x - g(x), self.norm) + rounding

    def log_det(
        self, x: Tensor, terms: int = 8, probes: int = 1, unbiased: bool = False, padding: Tensor | None = None
    ) -> LogDet:
        """log det(I + J) = tr J - tr J^2 / 2 + tr J^3 / 3 - ..., J = D_x g, traces by v'Jv over random signs v.

        terms:    how many terms are summed; the remainder is bounded by theory.
        unbiased: go on after them for a random number of terms, each weighted by the inverse of its probability
                  (Chen et al. 2019, Russian roulette): no remainder, more variance.
        Differentiable in x and in the weights of g.
        """
        x = _real(x, padding)
        check_input(x)
        for name, value in (("terms", terms), ("probes", probes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a positive integer, got {value!r}")
        keep = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            x = self._as_fine_as_g(x.clone() if x.is_inference() else x)
            signs = torch.randint(0, 2, (probes, *x.shape), device=x.device).to(x.dtype) * 2 - 1
            weights = _series_weights(terms, probes, self.constant if unbiased else 0.0).to(x)
            if padding is not None:
                padding = padding.expand(probes, *padding.shape).reshape(-1, padding.shape[-1])
            found = _power_series(_at(self.g, padding), x, signs, weights, keep)
        spread = found.detach().std(dim=0) / math.sqrt(probes) if probes > 1 else torch.full_like(found[0], math.nan)
        lost = 0.0 if unbiased else remainder(self.constant, terms, x.shape[-2] * x.shape[-1])
        return LogDet(found.mean(dim=0), spread.detach(), lost)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}, norm={self.norm:g}"


def _at(g: nn.Module, padding: Tensor | None) -> Callable[[Tensor], Tensor]:
    """g for tokens of which some are padding."""
    if padding is None:
        return g
    if not isinstance(g, AttentionLayer):
        raise UserError(
            f"padding is for attention, and g is a {type(g).__name__}; a map of each token by itself needs none"
        )
    return lambda x: g(x, padding)


def _real(x: Tensor, padding: Tensor | None) -> Tensor:
    """x with zeros in place of the padded tokens, whatever they hold."""
    if padding is None:
        return x
    check_padding(padding, x)
    return x.masked_fill(~padding[..., None], 0)


def theory_steps(constant: float, first: Tensor, goal: Tensor) -> Tensor:
    """The least k with constant^k / (1 - constant) first <= goal: Banach's estimate before the iteration starts."""
    ratio = (first / (goal * (1 - constant))).double().clamp_min(1.0)
    return torch.ceil(ratio.log() / -math.log(constant)).clamp_min(1).long()


def remainder(constant: float, terms: int, size: int) -> float:
    """size c^(m+1) / ((m+1) (1-c)) >= sum over k > m of |tr J^k| / k, since |tr J^k| <= size c^k."""
    return size * constant ** (terms + 1) / ((terms + 1) * (1 - constant))


def _power_series(g: Callable[[Tensor], Tensor], x: Tensor, signs: Tensor, weights: Tensor, keep: bool) -> Tensor:
    """sum over k of weights[k] v'J^k v, J = D_x g, for every v of signs [probes, ...]: [probes] or [probes, B].

    Every probe has its own copy of x in one batch, so that a term costs one backward pass for all of them.
    """
    many = (x if keep else x.detach()).expand_as(signs).reshape(-1, *x.shape[-2:])
    many = many if many.requires_grad else many.requires_grad_(True)
    y = g(many)
    v = w = signs.reshape(many.shape)
    total = torch.zeros(signs.shape[:-2], dtype=x.dtype, device=x.device)
    for weight in weights:
        if not y.requires_grad:  # g does not read x
            break
        (w,) = torch.autograd.grad(y, many, w, create_graph=keep, retain_graph=True, materialize_grads=True)
        inner = (w * v).sum(dim=(-2, -1)).reshape(total.shape)
        total = total + weight.reshape(-1, *[1] * (total.ndim - 1)) * inner
    return total


def _series_weights(terms: int, probes: int, going_on: float) -> Tensor:
    """(-1)^(k+1) / k for `terms` terms, [k, probes], and a tail of random length for each probe.

    The tail goes on with probability going_on after each term, and its j-th term is divided by going_on^j.
    """
    tails = torch.zeros(probes, dtype=torch.long)
    walking = torch.rand(probes) < going_on
    while bool(walking.any()):
        tails += walking
        walking = walking & (torch.rand(probes) < going_on)
    k = torch.arange(1, terms + int(tails.max()) + 1, dtype=torch.float64)[:, None]
    late = (k - terms).clamp_min(0)
    return torch.where(late <= tails, (-1.0) ** (k + 1) / k / (going_on or 1.0) ** late, 0.0)


def _length(x: Tensor, norm: float) -> Tensor:
    """The norm of each sequence, in float64; squares of scaled entries neither overflow nor vanish."""
    flat = x.flatten(-2).double()
    largest = flat.abs().amax(dim=-1)
    if norm == math.inf:
        return largest
    return torch.linalg.vector_norm(flat / largest.where(largest != 0, 1.0)[..., None], dim=-1) * largest


def _contraction(g: nn.Module, constant: float | None) -> float:
    """The constant to rely on, or a letter that says why there is none."""
    own, name = getattr(g, "constant", None), type(g).__name__
    if constant is None and own is None:
        raise UserError(
            f"{name} states no Lipschitz constant; give InvertibleResidual(g, constant=...) a bound below 1, "
            "or a g that has one, such as ContractiveL2Attention(dim, heads, constant=0.9)"
        )
    chosen = own if constant is None else constant
    if isinstance(chosen, bool) or not isinstance(chosen, int | float) or not 0 < chosen < 1:
        raise UserError(f"constant must lie strictly between 0 and 1, got {chosen!r}: x + g(x) need not invert")
    if own is not None and chosen < own:
        raise UserError(f"constant={chosen:g} is below the constant {own:g} that {name} states for itself")
    if own is None and isinstance(g, AttentionLayer):
        bound = g.lipschitz_bound(2)
        said = "has no Lipschitz constant" if bound == math.inf else f"promises none: {bound:.3g} bounds it at 2 tokens"
        raise UserError(f"{name} {said}, more with other weights; take ContractiveL2Attention({g.dim}, {g.heads}, 0.9)")
    return float(chosen)
