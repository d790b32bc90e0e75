"""Gaussian inputs: attention keeps them Gaussian, and their mean and covariance solve a closed equation.

A query x tilts N(alpha, Sigma) by its scores, and a tilted Gaussian is Gaussian, its mean affine in x. Hence

    Gamma_mu(x) = M x + c,   d alpha/dt = M alpha + c,   d Sigma/dt = M Sigma + Sigma M'

with M = V Sigma A and c = V alpha for one head with dot products, whose covariance may blow up in finite time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.kernels import L2, default_scale
from lipscope.attention.layer import SelfAttention
from lipscope.dynamics.integration import Ending, Progress, check_tolerance, instants, integrate
from lipscope.dynamics.particles import value_matrix
from lipscope.linalg.differentiate import check_tensor
from lipscope.mean_field.attention_on_measures import liftable

Affine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

IMMINENT = 1e-9
"""Blow-up is declared when it lies closer than this fraction of the time passed."""


@dataclass(frozen=True, eq=False)
class GaussianFlow:
    """N(mean, covariance) along depth: means [T, d] and covariances [T, d, d] at times [T].

    maps [T, d, d]: a token that starts at x is at means + maps (x - means[0]); covariances are maps Sigma_0 maps'.
    blow_up:        the time at which the covariance becomes infinite, where that happens before the time asked for.
    """

    times: Tensor
    means: Tensor
    covariances: Tensor
    maps: Tensor
    ending: Ending
    blow_up: float | None
    steps: int

    @property
    def ok(self) -> bool:
        """Whether it reached the time asked for."""
        return self.ending is Ending.FINISHED

    @property
    def status(self) -> str:
        if self.blow_up is not None:
            return f"{self.ending.value}: the covariance is infinite at t = {self.blow_up:.9g} ({self.steps} steps)"
        return f"{self.ending.value} (t = {self.times[-1].item():.6g}, {self.steps} steps)"


def gaussian_flow(
    f: SelfAttention,
    mean: Tensor,
    covariance: Tensor,
    time: float,
    *,
    frames: int = 65,
    tol: float = 1e-9,
    max_steps: int = 10_000,
    progress: Progress | None = None,
) -> GaussianFlow:
    """The flow of N(mean [d], covariance [d, d]) under f to `time`, or to its blow-up: any heads, biases, Dot or L2.

    A causal f is taken on tokens whose law does not depend on their position: then every token sees, in the limit of
    many, the law that all have, and the mask makes no difference. Other masked inputs have no closed equation.
    """
    _check(f, mean, covariance)
    times = instants(time, frames)
    check_tolerance(tol)
    mean, covariance, d = mean.detach(), covariance.detach(), len(mean)
    start = torch.cat([mean[:, None], torch.eye(d, dtype=mean.dtype, device=mean.device)], dim=1)

    velocity = affine_velocity(f)

    def field(_: float, state: Tensor) -> Tensor:
        """The state is [alpha, F], F the derivative of where a token is in where it started: Sigma = F Sigma_0 F'."""
        alpha, F = state[:, 0], state[:, 1:]
        M, c = velocity(alpha, F @ covariance @ F.mT)
        return torch.cat([(M @ alpha + c)[:, None], M @ F], dim=1)

    approach = _Approach(velocity, covariance)
    path = integrate(
        field,
        start,
        times,
        rtol=tol,
        atol=tol * max(1.0, mean.abs().max().item()),
        watch=approach,
        max_steps=max_steps,
        progress=progress,
    )
    F = path.states[..., 1:]
    blow_up = approach.time if path.ending is Ending.BLOW_UP else None
    return GaussianFlow(
        path.times, path.states[..., 0], F @ covariance @ F.mT, F, path.ending, blow_up, path.steps
    )


def affine_velocity(f: SelfAttention) -> Affine:
    """(alpha, Sigma) -> M [d, d] and c [d] with Gamma_mu(x) = M x + c for mu = N(alpha, Sigma)."""
    heads = [f.head(h) for h in range(f.heads)]

    def velocity(alpha: Tensor, Sigma: Tensor) -> tuple[Tensor, Tensor]:
        rates, shifts = zip(*(_head_velocity(head, alpha, Sigma) for head in heads), strict=True)
        M, c = torch.cat(rates), torch.cat(shifts)
        return (M, c) if f.O is None else (f.O @ M, f.O @ c)

    return velocity


def _head_velocity(f: SelfAttention, alpha: Tensor, Sigma: Tensor) -> tuple[Tensor, Tensor]:
    """One head: values V y + b_v at y, the mean of the Gaussian that the scores of x tilt."""
    bq, bk, bv = (0.0 if b is None else b for b in f.biases or (None, None, None))
    scale = default_scale(f.kernel, f.Q.shape[0])
    if isinstance(f.kernel, L2):
        # -s |Q x + b_q - K y - b_k|^2 adds 2 s K'K to the precision of y, and pulls with 2 s K'(Q x + b_q - b_k).
        pull = 2 * scale * Sigma @ f.K.T
        narrow = torch.linalg.inv(
            torch.eye(len(alpha), dtype=alpha.dtype, device=alpha.device) + pull @ f.K
        )
        M, c = (
            narrow @ pull @ f.Q,
            narrow @ (alpha + pull @ (bq - bk + torch.zeros_like(f.K[:, 0]))),
        )
    else:
        pull = scale * Sigma @ f.K.T
        M, c = pull @ f.Q, alpha + pull @ (bq + torch.zeros_like(f.K[:, 0]))
    return f.V @ M, f.V @ c + bv


class _Approach:
    """Watches the covariance. Near its blow-up Sigma ~ C / (t* - t), so that |Sigma| / |dSigma/dt| is the time left."""

    def __init__(self, velocity: Affine, covariance: Tensor):
        self.velocity, self.covariance = velocity, covariance
        self.time: float | None = None

    def __call__(self, t: float, state: Tensor) -> Ending | None:
        alpha, F = state[:, 0], state[:, 1:]
        Sigma = F @ self.covariance @ F.mT
        M, _ = self.velocity(alpha, Sigma)
        growth = 2 * (M @ Sigma).diagonal().sum().item()
        if growth <= 0:
            return None
        left = Sigma.diagonal().sum().item() / growth
        if left > IMMINENT * t:
            return None
        self.time = t + left
        return Ending.BLOW_UP


def _check(f: SelfAttention, mean: Tensor, covariance: Tensor) -> None:
    liftable(f)
    if f.kernel.softcap is not None:
        raise UserError(
            "f has a softcap: its scores are not linear, and a Gaussian does not stay one; leave it out"
        )
    d = f.Q.shape[1]
    if value_matrix(f).shape[0] != d:
        raise UserError(
            f"f maps tokens of size {d} to size {value_matrix(f).shape[0]}; a flow needs them equal"
        )
    for name, x, shape in (("mean", mean, (d,)), ("covariance", covariance, (d, d))):
        if not isinstance(x, Tensor) or tuple(x.shape) != shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"{name} must be a tensor of shape {shape}, got {got}")
        check_tensor(name, x)
        if x.dtype != f.Q.dtype or x.device != f.Q.device:
            raise UserError(
                f"{name} is {x.dtype} on {x.device} and f {f.Q.dtype} on {f.Q.device}; convert one"
            )
    size = covariance.abs().max().item()
    if (covariance - covariance.T).abs().max().item() > 1e-6 * size:
        raise UserError("the covariance must be symmetric; give (C + C.T) / 2")
    lowest = torch.linalg.eigvalsh(covariance.double()).min().item()
    if lowest < -1e-6 * size:
        raise UserError(
            f"the covariance must have no negative eigenvalue, its smallest is {lowest:.3g}"
        )
