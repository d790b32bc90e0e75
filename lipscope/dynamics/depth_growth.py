"""Growth of perturbations along depth: the whole network against the product of its layers.

    || D_X X_l ||  <=  prod_{k<l} || I + h J_k ||  <=  exp( h sum_{k<l} || J_k || )

with J_k = D f(X_k) and h = time/layers. As h -> 0 the middle term tends to exp of the integral of
the largest eigenvalue of (J + J')/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import Status
from lipscope.attention.layer import SelfAttention
from lipscope.dynamics.integration import Progress, check_count, check_tolerance
from lipscope.dynamics.particles import Flow, layered
from lipscope.linalg.estimate import Estimate, as_single
from lipscope.linalg.operator import LinearOperator
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.mean_field.measures import DiscreteMeasure, derivative


@dataclass(frozen=True, eq=False)
class DepthGrowth(Displayed):
    """Growth factors of perturbations at depths `times` [T], the first of them 0.

    sigma:    || D_X X(t) ||, the largest factor by which the network up to this depth amplifies a
              small change
    product:  the product of the constants of the layers X -> X + h f(X), each at its own input
    gronwall: exp of the integral of || D f ||, which bounds that product
    local:    || D f || at the tokens of this depth
    overflow: the first depth at which the derivative of a layer, or of the network, overflows the
              dtype, where the numbers end; None if there is none
    For a measure, all norms are those of L2(mu).
    """

    flow: Flow
    times: Tensor
    sigma: Tensor
    product: Tensor
    gronwall: Tensor
    local: Tensor
    statuses: tuple[Status, ...]
    overflow: float | None = None

    def plot(self, ax: Any = None) -> Any:
        """Plot the growth along depth, with the product over layers; returns matplotlib Axes."""
        from lipscope.report.simulations import plot_depth_growth

        return plot_depth_growth(self, ax)

    @property
    def summary(self) -> str:
        grown = (
            f"at depth {self.times[-1].item():.4g} a change can grow by a factor of "
            f"{self.sigma[-1].item():.4g}; the product over layers is {self.product[-1].item():.4g}"
        )
        said = [next((s.value for s in self.statuses if not s.ok), grown)]
        if self.overflow is not None:
            said.append(
                f"derivatives overflow this dtype from depth {self.overflow:.4g} on; "
                "use a shorter time"
            )
        if self.flow.unresolved is not None:
            said.append(
                f"from depth {self.flow.unresolved:.4g} on, rounding decides between keys of "
                "nearly equal score"
            )
        if not self.flow.ok:
            said.append(
                f"the network ends at depth {self.flow.times[-1].item():.4g}: "
                f"{self.flow.ending.value}"
            )
        return "; ".join(said)


@entry_point
def growth_along_depth(
    f: SelfAttention,
    X: Tensor | DiscreteMeasure,
    time: float,
    layers: int = 48,
    *,
    points: int = 24,
    tol: float = 1e-6,
    progress: Progress | None = None,
) -> DepthGrowth:
    """Measure how perturbations grow through the residual network X <- X + (time/layers) f(X).

    Args:
        f: The attention of every layer.
        X: Tokens [n, d], or a measure, whose atoms are the tokens.
        time: Total depth.
        layers: Number of residual layers.
        points: Approximate number of depths at which the whole network is measured.
        tol: Relative residual at which the solver stops.
        progress: Called with (done, total) as the computation proceeds.

    Returns:
        The growth of the whole network, beside the product over its layers.

    Raises:
        UserError: If a number is out of range, or the tokens do not fit f.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
        >>> f = ls.SelfAttention(eye, eye, eye)
        >>> found = ls.dynamics.growth_along_depth(f, X, time=1.0, layers=4)
        >>> bool((found.sigma <= found.product * (1 + 1e-6)).all())
        True
    """
    check_count("points", points)
    check_tolerance(tol)
    path = layered(f, X, time, layers)
    step = time / layers
    count = path.steps
    local, alone, operators = _layer_by_layer(f, X, path, step, tol, progress)
    lost = None if len(local) > count else len(local)
    # Rounded and deduplicated: there may be fewer layers than points.
    depths = sorted({round(i * max(0, len(local) - 1) / points) for i in range(points + 1)})
    whole = []
    for depth in depths[1:]:
        norms = [e.value for e in alone[:depth]]
        found = as_single(
            spectral_norm(composed(operators[:depth], norms), tol, solver=Solver(seed=0))
        )
        if not math.isfinite(float(found.value)):
            lost = depth
            break
        whole.append(found)
        if progress:
            progress(count + depth, 2 * count + 1)
    if progress:
        progress(2 * count + 1, 2 * count + 1)
    at = torch.tensor(depths[: len(whole) + 1])
    steps = torch.tensor([e.value for e in local] or [math.nan], dtype=torch.float64)
    product = torch.tensor([1.0, *(e.value for e in alone)], dtype=torch.float64).cumprod(0)
    # A Riemann sum at the left ends: exp of it bounds the product, as 1 + x <= e^x.
    integral = torch.cat([torch.zeros(1, dtype=torch.float64), step * steps.cumsum(0)])
    return DepthGrowth(
        flow=path,
        times=path.times[at],
        sigma=torch.tensor([1.0, *(e.value for e in whole)], dtype=torch.float64),
        product=product[at],
        gronwall=integral[at].exp(),
        local=steps[at],
        statuses=tuple(e.status for e in (*local, *alone, *whole)),
        overflow=None if lost is None else path.times[lost].item(),
    )


def _layer_by_layer(
    f: SelfAttention,
    X: Tensor | DiscreteMeasure,
    path: Flow,
    step: float,
    tol: float,
    progress: Progress | None,
) -> tuple[list[Estimate], list[Estimate], list[LinearOperator]]:
    """|| J_k ||, || I + step J_k || and that operator for every state, until one overflows."""
    local = []
    alone = []
    operators = []
    for k, x in enumerate(path.positions):
        J = f.jacobian(x) if isinstance(X, Tensor) else derivative(f, replace(X, points=x))
        size = J.rounding.size
        # I + step J.
        both = J.changed(
            lambda pair: (lambda E: E + step * pair[0](E), lambda U: U + step * pair[1](U)),
            size=None if size is None else 1 + step * torch.as_tensor(size),
        )
        found = [as_single(spectral_norm(j, tol, solver=Solver(seed=0))) for j in (J, both)]
        if not all(math.isfinite(float(e.value)) for e in found):
            break
        local.append(found[0])
        alone.append(found[1])
        operators.append(both)
        if progress:
            progress(k, 2 * path.steps + 1)
    return local, alone, operators


def composed(operators: Sequence[LinearOperator], norms: Sequence[float]) -> LinearOperator:
    """Return the composition of the operators, the first applied first."""
    # A loop, not nested closures: networks can be deeper than the call stack. On `size`: a rounding
    # error of one operator passes through all others, which amplify it by at most their norms.

    def forward(E: Tensor) -> Tensor:
        for J in operators:
            E = J.mv(E)
        return E

    def backward(U: Tensor) -> Tensor:
        for J in reversed(operators):
            U = J.rmv(U)
        return U

    sizes = [
        float(norm if J.rounding.size is None else J.rounding.size)
        for J, norm in zip(operators, norms, strict=True)
    ]
    return operators[0].changed(
        lambda pair: (forward, backward),
        condition=torch.stack([torch.as_tensor(J.rounding.condition) for J in operators]).max(),
        worst=torch.stack([torch.as_tensor(J.rounding.pessimistic) for J in operators]).max(),
        size=math.fsum(
            size * math.prod(norms[:k]) * math.prod(norms[k + 1 :]) for k, size in enumerate(sizes)
        ),
    )
