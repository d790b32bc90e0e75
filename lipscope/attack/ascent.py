"""Gradient ascent on sigma(X) = ||D_X f|| over a set of inputs.

With J right = sigma left, a simple sigma has d sigma = <left, D_X (J right)>: one more derivative
of f, none of the solver. Each step costs that gradient and a warm-started solve of a few products;
a step that does not increase sigma is undone and shortened. The result is measured again, from a
random start that is independent of the search.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lipscope._ambient import callers_device, entry_point, ordinary_module, plain_attention
from lipscope._checks import check_fields
from lipscope._types import Around, Ball, Domain, Point, UserError
from lipscope.attack.constructions import explicit_inputs
from lipscope.attack.search import Found, Normed, Region, Search, measured, region_of
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot
from lipscope.linalg.differentiate import Map, device_of, jacobian
from lipscope.linalg.estimate import as_batch
from lipscope.linalg.spectral import Solver, fresh_seed, spectral_norm

WARM_TOL = 1e-3
WARM_STEPS = 12
"""A warm solve stops early: its value is a valid lower bound on sigma all the same."""

FIRST = 0.3
"""First step, relative to the region's size."""

MOMENTUM = 0.9
"""Share of the last successful step in the next; an unsuccessful step resets it."""

SIEVE = 16
"""Random inputs tried per random start."""

NOISE = 0.1
"""Random part of a warm start: after a step, another singular vector may be the top one."""


@dataclass(frozen=True)
class Climb:
    """How `ascend` searches.

    Attributes:
        steps: Number of ascent steps.
        restarts: Number of random starts, and of known starts where there are any.
        seed: Seed of the random starts.

    Raises:
        UserError: If steps is negative or restarts is below 1.

    Example:
        >>> import lipscope as ls
        >>> ls.attack.Climb(steps=10)
        Climb(steps=10, restarts=4, seed=0)
    """

    steps: int = 60
    restarts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps < 0 or self.restarts < 1:
            raise UserError(
                "Climb needs steps >= 0 and restarts >= 1, "
                f"got steps={self.steps} and restarts={self.restarts}"
            )


@entry_point
def ascend(
    f: Map,
    domain: Domain | Normed,
    climb: Climb | None = None,
    *,
    dim: int | None = None,
    starts: Sequence[Tensor] = (),
) -> Found:
    """Search a domain for the input with the largest sigma, by gradient ascent.

    Args:
        f: A map of [B, n, d] that treats the members of a batch independently, such as a
            SelfAttention. The search is in float64, on a copy if f is a module of lower precision.
        domain: Ball(R, n), Around(X, r) or Normed(weight, n).
        climb: Steps, restarts and seed.
        dim: Size of a token, needed in a Ball if f is not a SelfAttention.
        starts: Inputs [n, d] to start from, besides random ones. For a SelfAttention in a Ball the
            explicit constructions are starts as well, so the result is never below them. In a
            Ball, a map without weights of its own is searched on the device of the first start.

    Returns:
        The best input found, measured again from a fresh start.

    Raises:
        UserError: If the domain, a start or dim does not fit f.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> f = ls.SelfAttention(-eye, eye, eye)
        >>> found = ls.attack.ascend(f, ls.Ball(R=2.0, n=4), ls.attack.Climb(steps=5, restarts=1))
        >>> found.value >= ls.attack.explicit_inputs(f, ls.Ball(R=2.0, n=4))[0].value - 1e-6
        True
    """
    climb = climb or Climb()
    if isinstance(f, SelfAttention):
        f = f.double()
        if isinstance(domain, Ball) and 2 * f.Q.shape[0] + f.V.shape[0] < f.Q.shape[1]:
            return _in_fewer_dimensions(f, domain, climb, starts)
    elif isinstance(f, nn.Module):
        f = ordinary_module(f)
        if any(p.is_floating_point() and p.dtype != torch.float64 for p in f.parameters()):
            f = copy.deepcopy(f).double()
    size = f.Q.shape[1] if isinstance(f, SelfAttention) else dim
    region = region_of(domain, size, _device(f, domain, starts))
    Z = _starts(f, domain, region, climb, starts)
    Z, value = _climb(f, region, Z, climb)
    best = int(value.argmax())
    return measured(f, [("ascent", region.tokens(Z[best]))], climb.seed)[0]


def sigma_gradient(f: Map, X: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the gradient of sum_b <left_b, D_X f right_b> in X, with the vectors held fixed."""
    x = X.detach().clone().requires_grad_(True)
    with torch.enable_grad(), plain_attention(), callers_device():
        y = f(x.clone())  # which f may change in place
        (pulled,) = torch.autograd.grad(
            y, x, left.reshape(y.shape), create_graph=True, materialize_grads=True
        )
        if not pulled.requires_grad:
            return torch.zeros_like(X)
        (gradient,) = torch.autograd.grad((pulled * right).sum(), x, materialize_grads=True)
    return gradient


def _climb(f: Map, region: Region, Z: Tensor, climb: Climb) -> tuple[Tensor, Tensor]:
    """Ascend from every start of Z independently, in one batch."""
    generator = torch.Generator().manual_seed(climb.seed)
    X = region.tokens(Z)
    top = as_batch(spectral_norm(jacobian(f, X), WARM_TOL, solver=Solver(seed=climb.seed)))
    value = top.value.nan_to_num(nan=0.0)
    stride = torch.full_like(value, FIRST * region.size)
    search = Search(value, (Z, X, top.left, top.right), stride)
    # Tokens are affine in the coordinates: dX = slope * dZ.
    slope = region.tokens(torch.ones_like(Z)) - region.tokens(torch.zeros_like(Z))
    course = torch.zeros_like(Z)
    for _ in range(climb.steps):
        Z, X, left, right = search.state
        # Chain rule: the gradient in the coordinates is slope times that in the tokens.
        uphill = _unit(slope * sigma_gradient(f, X, left, right))
        course = _unit(uphill + MOMENTUM * course)
        trial = region.project(Z + search.stride.to(Z)[:, None, None] * course)
        moved = region.tokens(trial)
        noise = torch.randn(right.shape, generator=generator, dtype=torch.float64).to(right)
        start = right + NOISE * noise / noise.norm(dim=(1, 2), keepdim=True)
        warm = spectral_norm(
            jacobian(f, moved), WARM_TOL, start=start, solver=Solver(max_steps=WARM_STEPS)
        )
        kept = search.judge(as_batch(warm).value, trial, moved, warm.left, warm.right)
        # Momentum follows the step after projection; the part that left the region is lost anyway.
        course = torch.where(kept[:, None, None].to(Z.device), _unit(trial - Z), 0.0)
    return search.state[0], search.value


def _unit(Z: Tensor) -> Tensor:
    return Z / Z.norm(dim=(1, 2), keepdim=True).clamp_min(1e-300)


def _starts(
    f: Map, domain: Domain | Normed, region: Region, climb: Climb, starts: Sequence[Tensor]
) -> Tensor:
    """Choose the best of many random inputs, and of the known ones: starts and constructions."""
    generator = torch.Generator().manual_seed(climb.seed)
    drawn = region.draw(SIEVE * climb.restarts, generator)
    known = [region.coordinates(x.to(drawn)) for x in starts]
    if (
        isinstance(f, SelfAttention)
        and isinstance(f.kernel, Dot)
        and isinstance(domain, Ball)
        and domain.n > 1
    ):
        # Each construction also starts with noise added: at a symmetric input the gradient is
        # symmetric, and the ascent could not leave the symmetry. The order decides which noise each
        # gets, so it must not depend on the seed of the final measurement.
        own = fresh_seed(climb.seed, "constructions")
        exact = [one.X for one in explicit_inputs(f, domain, seed=own)]
        noise = torch.randn(len(exact), *drawn.shape[1:], generator=generator, dtype=torch.float64)
        known += exact + list(torch.stack(exact) + 0.01 * domain.R * noise.to(drawn))
    for x in known:
        if x.shape != drawn.shape[1:]:
            raise UserError(
                f"a start must have shape {tuple(drawn.shape[1:])}, got {tuple(x.shape)}"
            )
    chosen = [_best(f, region, drawn, climb)]
    if known:
        chosen.append(_best(f, region, region.project(torch.stack(known)), climb))
    return torch.cat(chosen)


def _best(f: Map, region: Region, Z: Tensor, climb: Climb) -> Tensor:
    """Return the `restarts` members of Z with the largest sigma, roughly solved."""
    quick = Solver(max_steps=WARM_STEPS, seed=0)
    rough = as_batch(spectral_norm(jacobian(f, region.tokens(Z)), WARM_TOL, solver=quick))
    return Z[rough.value.nan_to_num(nan=0.0).topk(min(climb.restarts, len(Z))).indices]


def _device(f: Map, domain: Domain | Normed, starts: Sequence[Tensor]) -> torch.device:
    """Where f takes its input: where its weights are, else where the domain or a start is."""
    if isinstance(f, SelfAttention):
        return f.Q.device
    if isinstance(domain, Point | Around):
        return device_of(f, domain.X)
    return device_of(f, *([domain.weight] if isinstance(domain, Normed) else starts))


def _in_fewer_dimensions(
    f: SelfAttention, ball: Ball, climb: Climb, starts: Sequence[Tensor]
) -> Found:
    """Ascend in the span of the rows of Q, K and V: attention depends on X only through it."""
    basis = torch.linalg.qr(torch.cat([f.Q, f.K, f.V]).T)[0]
    narrow = replace(f, Q=f.Q @ basis, K=f.K @ basis, V=f.V @ basis)
    found = ascend(narrow, ball, climb, starts=[x.to(basis) @ basis for x in starts])
    X = region_of(ball, f.Q.shape[1], basis.device).project(found.X @ basis.T)
    return measured(f, [("ascent", X)], climb.seed)[0]
