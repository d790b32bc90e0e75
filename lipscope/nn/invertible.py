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
from lipscope.nn.attention_layer import AttentionLayer, check_norm, check_padding
from lipscope.nn.contractive_mlp import ContractiveMLP
from lipscope.nn.determinant_series import power_series, remainder, series_weights
from lipscope.nn.l2_attention import ContractiveL2Attention
from lipscope.nn.parametrize import SpectralNormalised
from lipscope.nn.wrapped import unwrapped

ROUNDING = 64
"""How many units in the last place of its input one evaluation of g is trusted to."""

NEIGHBOURS, EXCESS = 64, 16
"""How many tokens next to those of x tell how far rounding moves g, and how many times the largest move is allowed."""

PROVED = (ContractiveL2Attention, ContractiveMLP)
"""The layers whose constant is a theorem: what contradicts it is rounding."""


@dataclass(frozen=True, eq=False)
class Inverse:
    """x with x + g(x) = y: how far it can be from the true one (a number a sequence, in the norm of g), and steps.

    noisy: True where rounding inside g ended the steps early, as of tokens close to each other and far from the rest.
           error_bound allows for it and is larger then; float64 makes it smaller.
    """

    value: Tensor
    error_bound: Tensor
    steps: Tensor
    noisy: Tensor


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

    Tokens are [n, d] or a batch [B, n, d] whose members g treats apart. constant is g.constant where it is omitted; it
    is that of g, and the residual itself has 1 + constant: residuals are put one after the other, not into each other.
    padding, [n] or [B, n], True for real tokens, is for a g that is attention; padded tokens come out as they went in.
    """

    def __init__(self, g: nn.Module, constant: float | None = None) -> None:
        super().__init__()
        _check_map(g)
        self.g, self.given = g, constant
        self.norm = _norm(g)
        self.constant  # noqa: B018

    @property
    def constant(self) -> float:
        """What bounds the Lipschitz constant of g, asked of g anew: it may have been changed."""
        return _contraction(self.g, self.given)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return x + _at(self.g, padding)(x)

    @torch.no_grad()
    def inverse(self, y: Tensor, padding: Tensor | None = None) -> Inverse:
        """x = y - g(x), repeated from x = y down to the resolution of the dtype, in no more steps than theory asks.

        error_bound is ||y - x - g(x)|| / (1 - constant) with the residual taken in float64, so rounding is inside it;
        that of g in float64 is measured at points next to x.
        """
        real = _real(y, padding)
        check_input(real)
        with torch.autocast(y.device.type, enabled=False):  # which would round g to less than y has
            found = self._fixed_point(self._as_fine_as_g(real), padding)
        return (
            found
            if padding is None
            else replace(found, value=found.value.where(padding[..., None], y))
        )

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
        noisy = torch.zeros_like(active)
        while bool(active.any()):
            new = y - g(x)
            moved = _length(new - x, self.norm)
            far = active & ~(moved <= (1 + 1e-3) * c * step + ROUNDING * goal)
            if bool(far.any()):
                self._check_promise(far, x, step, moved, g)
                noisy, active = noisy | far, active & ~far
            x = torch.where(active[..., None, None], new, x)
            steps = steps + active
            # Within rounding of the goal, a step that is no shorter than the last one is noise.
            lost = (moved >= step) & (step <= ROUNDING * goal)
            step = torch.where(active, moved, step)
            active = active & ~lost & (c / (1 - c) * step > goal) & (steps < allowed)
        return Inverse(x, self._residual(x, y, padding) / (1 - c), steps, noisy)

    def _check_promise(
        self, far: Tensor, x: Tensor, step: Tensor, moved: Tensor, g: Callable[[Tensor], Tensor]
    ) -> None:
        """Where images are too far apart for the constant, rounding may be why; of layers with a proof it is."""
        if isinstance(unwrapped(self.g), PROVED):
            return
        broken = far & ~(
            moved <= self.constant * step + EXCESS * _noise(g, x, self.constant, self.norm)
        )
        if bool(broken.any()):
            raise UserError(
                f"g is no contraction with constant {self.constant:g}: two points {step[broken].max():.3g} apart have "
                f"images {moved[broken].max():.3g} apart, and rounding does not explain it; give a constant that "
                "bounds it, or a g that has one"
            )

    def _residual(self, x: Tensor, y: Tensor, padding: Tensor | None) -> Tensor:
        x, y = x.double(), y.double()
        g = _at(copy.deepcopy(self.g).double(), padding)
        rounding = (
            ROUNDING
            * torch.finfo(torch.float64).eps
            * (_length(x, self.norm) + _length(y, self.norm))
        )
        noise = EXCESS * _noise(g, x, self.constant, self.norm)
        return _length(y - x - g(x), self.norm) + rounding + noise

    def log_det(
        self,
        x: Tensor,
        terms: int = 8,
        probes: int = 1,
        unbiased: bool = False,
        padding: Tensor | None = None,
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
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(x.device.type, enabled=False),
        ):
            x = self._as_fine_as_g(x.clone() if x.is_inference() else x)
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
        return LogDet(found.mean(dim=0), spread.detach(), lost)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}, norm={self.norm:g}"


def _at(g: nn.Module, padding: Tensor | None) -> Callable[[Tensor], Tensor]:
    """g for tokens of which some are padding."""
    if padding is None:
        return g
    if not isinstance(unwrapped(g), AttentionLayer):
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


def _noise(g: Callable[[Tensor], Tensor], x: Tensor, constant: float, norm: float) -> Tensor:
    """How far rounding moves g at x, for each sequence: what points next to x are farther apart in g than promised."""
    generator, here = torch.Generator().manual_seed(0), g(x)
    largest = torch.zeros(x.shape[:-2], dtype=torch.float64, device=x.device)
    for _ in range(max(4, NEIGHBOURS // x.shape[-2])):
        # Far enough that sums of squares round otherwise: they may not see the last place of a token.
        places = ROUNDING * (2 * torch.rand(x.shape, generator=generator).to(x) - 1)
        near = x + torch.finfo(x.dtype).eps * places * x
        largest = torch.maximum(
            largest, _length(g(near) - here, norm) - constant * _length(near - x, norm)
        )
    return largest


def theory_steps(constant: float, first: Tensor, goal: Tensor) -> Tensor:
    """The least k with constant^k / (1 - constant) first <= goal: Banach's estimate before the iteration starts."""
    ratio = (first / (goal * (1 - constant))).double().clamp_min(1.0)
    return torch.ceil(ratio.log() / -math.log(constant)).clamp_min(1).long()


def _length(x: Tensor, norm: float) -> Tensor:
    """The norm of each sequence, in float64; squares of scaled entries neither overflow nor vanish."""
    flat = x.flatten(-2).double()
    largest = flat.abs().amax(dim=-1)
    if norm == math.inf:
        return largest
    return (
        torch.linalg.vector_norm(flat / largest.where(largest != 0, 1.0)[..., None], dim=-1)
        * largest
    )


def _check_map(g: nn.Module) -> None:
    if not isinstance(g, nn.Module):
        raise UserError(
            "g must be a torch.nn.Module, so that it can be evaluated in float64 too; "
            f"got {type(g).__name__}: make it the forward of a module"
        )
    inner = unwrapped(g)
    if isinstance(inner, InvertibleResidual):
        raise UserError(
            f"g is a residual x + g(x), no contraction: its g has the constant {inner.constant:g}, it has "
            f"{1 + inner.constant:g}; put residuals one after the other, torch.nn.Sequential(first, second)"
        )
    if isinstance(inner, SpectralNormalised):
        raise UserError(
            "g is a parametrization of weights, and its constant is a norm; give the layer that has them"
        )


def _norm(g: nn.Module) -> float:
    """g.norm where that is a number, 2 where g has none or has a layer of this name."""
    norm = getattr(g, "norm", 2)
    if not isinstance(norm, int | float):
        return 2
    check_norm(norm)
    return norm


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
        raise UserError(
            f"constant must lie strictly between 0 and 1, got {chosen!r}: x + g(x) need not invert"
        )
    if isinstance(own, int | float) and chosen < own:
        raise UserError(
            f"constant={chosen:g} is below the constant {own:g} that {name} states for itself"
        )
    layer = unwrapped(g)
    if own is None and isinstance(layer, AttentionLayer):
        raise UserError(
            f"{_why_not(layer)}; take ContractiveL2Attention({layer.dim}, {layer.heads}, constant=0.9)"
        )
    return float(chosen)


def _why_not(g: AttentionLayer) -> str:
    bound = g.lipschitz_bound(2)
    if bound == math.inf:
        return f"{type(g).__name__} has no Lipschitz constant, whatever its weights are"
    return (
        f"{type(g).__name__} promises no constant: with its present weights {bound:.3g} bounds it at 2 tokens, "
        "and more tokens or other weights make that larger"
    )
