"""Gaussian inputs: attention keeps them Gaussian, and their moments solve a closed equation.

A query x tilts N(alpha, Sigma) by its scores, and a tilted Gaussian is Gaussian, with a mean that
is affine in x. Hence

    Gamma_mu(x) = M x + c,   d alpha/dt = M alpha + c,   d Sigma/dt = M Sigma + Sigma M'

with M = V Sigma A and c = V alpha for one head with dot-product scores. The covariance may blow up
in finite time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2, default_scale
from lipscope.dynamics.integration import Ending, Progress, check_tolerance, instants, integrate
from lipscope.dynamics.particles import check_alike, check_square
from lipscope.linalg.differentiate import check_tensor
from lipscope.mean_field.measures import check_liftable

Affine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

IMMINENT = 1e-9
"""A blow-up is declared when it is closer than this fraction of the elapsed time."""


@dataclass(frozen=True, eq=False)
class GaussianFlow(Displayed):
    """A Gaussian along depth: means [T, d] and covariances [T, d, d] at times [T].

    maps [T, d, d]: a token that starts at x is at means + maps (x - means[0]); covariances are
                    maps Sigma_0 maps'
    blow_up:        the time at which the covariance becomes infinite, if it is before the end
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
        """Whether it reached the requested time."""
        return self.ending is Ending.FINISHED

    @property
    def summary(self) -> str:
        if self.blow_up is not None:
            return (
                f"{self.ending.value}: the covariance is infinite at t = {self.blow_up:.9g} "
                f"({self.steps} steps)"
            )
        return f"{self.ending.value} (t = {self.times[-1].item():.6g}, {self.steps} steps)"


@entry_point
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
    """Integrate the flow of a Gaussian under attention, up to `time` or to its blow-up.

    f may have any heads and biases and either kernel, Dot or L2. If f is causal, the law of a token
    must not depend on its position: then every token sees, in the limit of many tokens, the common
    law, and the mask makes no difference. Other masked inputs have no closed equation.

    Args:
        f: The attention.
        mean: Initial mean [d].
        covariance: Initial covariance [d, d], symmetric and positive semidefinite.
        time: Depth to integrate to.
        frames: Number of equidistant times in the result.
        tol: Error per step, relative and absolute.
        max_steps: Maximum number of integration steps.
        progress: Called with (time reached, final time) after every step.

    Returns:
        Means and covariances along depth, and the time of the blow-up if there is one.

    Raises:
        UserError: If f has a soft cap, or the moments do not fit f.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(1, dtype=torch.float64)
        >>> f = ls.SelfAttention(eye, eye, eye)
        >>> found = ls.dynamics.gaussian_flow(f, torch.zeros(1).double(), eye, time=0.25)
        >>> round(found.covariances[-1].item(), 6)  # 1 / (1 - 2 t), which blows up at t = 1/2
        2.0
    """
    _check(f, mean, covariance)
    times = instants(time, frames)
    check_tolerance(tol)
    mean, covariance, d = mean.detach(), covariance.detach(), len(mean)
    start = torch.cat([mean[:, None], torch.eye(d, dtype=mean.dtype, device=mean.device)], dim=1)

    velocity = affine_velocity(f)

    def field(_: float, state: Tensor) -> Tensor:
        # The state is [alpha, F], where F is the derivative of the flow: Sigma = F Sigma_0 F' stays
        # positive semidefinite, which an integrated Sigma would not.
        alpha = state[:, 0]
        F = state[:, 1:]
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
        times=path.times,
        means=path.states[..., 0],
        covariances=F @ covariance @ F.mT,
        maps=F,
        ending=path.ending,
        blow_up=blow_up,
        steps=path.steps,
    )


def affine_velocity(f: SelfAttention) -> Affine:
    """(alpha, Sigma) -> M [d, d] and c [d] with Gamma_mu(x) = M x + c for mu = N(alpha, Sigma)."""
    heads = [f.head(h) for h in range(f.heads)]

    def velocity(alpha: Tensor, Sigma: Tensor) -> tuple[Tensor, Tensor]:
        M, c = map(torch.cat, zip(*(_of_head(h, alpha, Sigma) for h in heads), strict=True))
        return (M, c) if f.O is None else (f.O @ M, f.O @ c)

    return velocity


def _of_head(f: SelfAttention, alpha: Tensor, Sigma: Tensor) -> tuple[Tensor, Tensor]:
    """M and c of one head: V y + b_v at the mean y of the tilted Gaussian."""
    bq, bk, bv = (0.0 if b is None else b for b in f.biases or (None, None, None))
    scale = default_scale(f.kernel, f.Q.shape[0])
    if isinstance(f.kernel, L2):
        # The score -s |Q x + b_q - K y - b_k|^2 adds 2 s K'K to the precision of y, and
        # 2 s K'(Q x + b_q - b_k) to precision times mean.
        pull = 2 * scale * Sigma @ f.K.T
        narrow = torch.linalg.inv(
            torch.eye(len(alpha), dtype=alpha.dtype, device=alpha.device) + pull @ f.K
        )
        M = narrow @ pull @ f.Q
        c = narrow @ (alpha + pull @ (bq - bk + torch.zeros_like(f.K[:, 0])))
    else:
        pull = scale * Sigma @ f.K.T
        M = pull @ f.Q
        c = alpha + pull @ (bq + torch.zeros_like(f.K[:, 0]))
    return f.V @ M, f.V @ c + bv


class _Approach:
    """Detects a blow-up: near it Sigma ~ C / (t* - t), and |Sigma| / |dSigma/dt| is t* - t."""

    def __init__(self, velocity: Affine, covariance: Tensor):
        self.velocity = velocity
        self.covariance = covariance
        self.time: float | None = None

    def __call__(self, t: float, state: Tensor) -> Ending | None:
        alpha = state[:, 0]
        F = state[:, 1:]
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
    check_liftable(f)
    if f.kernel.softcap is not None:
        raise UserError(
            "f has a softcap, under which a Gaussian does not stay Gaussian; use f without it"
        )
    d = check_square(f)
    for name, x, shape in (("mean", mean, (d,)), ("covariance", covariance, (d, d))):
        if not isinstance(x, Tensor) or tuple(x.shape) != shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"{name} must be a tensor of shape {shape}, got {got}")
        check_tensor(name, x)
        check_alike(f, name, x)
    size = covariance.abs().max().item()
    if (covariance - covariance.T).abs().max().item() > 1e-6 * size:
        raise UserError("covariance must be symmetric; pass (C + C.T) / 2")
    lowest = torch.linalg.eigvalsh(covariance.double()).min().item()
    if lowest < -1e-6 * size:
        raise UserError(
            f"covariance must have no negative eigenvalue, its smallest is {lowest:.3g}"
        )
