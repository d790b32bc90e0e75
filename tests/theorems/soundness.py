"""Soundness of any bound: dense Jacobians at inputs that try to break it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

import lipscope as ls
from lipscope._types import Around, Ball, Domain, Everywhere, Point
from lipscope.theorems.registry import REGISTRY, enclosing, evaluate, failed_hypothesis
from lipscope.theorems.statement import Bound
from tests.naive import dense_jacobian, naive_layer


@dataclass(frozen=True)
class Effort:
    """Number of random inputs per domain, and of steps of ascent."""

    random: int
    steps: int


@dataclass
class Tally:
    """Number of comparisons (bound, input), and the worst ratio per bound: at most 1 if sound."""

    pairs: int
    worst: dict[str, float]

    def note(self, bound: Bound, ratio: float) -> None:
        self.pairs += 1
        self.worst[bound.name] = max(self.worst.get(bound.name, 0.0), ratio)


def measured(norm: str, f: ls.SelfAttention, X: Tensor, J: Tensor, g: Generator) -> float:
    """The local constant of f at X in a norm, or a lower bound of it; J is D_X f."""
    if norm == "W2":
        return _weighted(f, X, g)
    if norm == "2":
        return torch.linalg.matrix_norm(J, 2).item()
    if norm == "inf":
        return J.abs().sum(dim=1).max().item()
    return _largest_token(J, len(X))


def _weighted(f: ls.SelfAttention, X: Tensor, g: Generator) -> float:
    """||W^(1/2) J W^(-1/2)|| for tokens as atoms of mass w, with log w added to the scores."""
    n = len(X)
    w = torch.softmax(3 * torch.randn(n, generator=g, dtype=torch.float64), 0)
    logs = w.log().expand(n, n)
    seen = (
        torch.ones(n, n, dtype=torch.bool).tril()
        if f.causal
        else torch.ones(n, n, dtype=torch.bool)
    )
    weighted = replace(f, mask=torch.where(seen, logs, -math.inf))
    J = dense_jacobian(weighted, X)
    out = w.sqrt().repeat_interleave(J.shape[0] // n)
    inner = w.sqrt().repeat_interleave(J.shape[1] // n)
    return torch.linalg.matrix_norm(out[:, None] * J / inner, 2).item()


def _largest_token(J: Tensor, n: int) -> float:
    """A lower bound of sup_i |sum_j J_ij e_j| over |e_j| <= 1, by alternating maximisation."""
    size = J.abs().max().clamp_min(1e-300)
    blocks = (J / size).reshape(n, -1, n, J.shape[1] // n).permute(0, 2, 1, 3)  # i, j, out, in
    target = torch.linalg.svd(blocks.sum(dim=1), full_matrices=False)[0][..., 0]  # i, out
    for _ in range(20):
        e = torch.einsum("ijab,ia->ijb", blocks, target)
        e = e / e.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        moved = torch.einsum("ijab,ijb->ia", blocks, e)
        target = moved / moved.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return moved.norm(dim=-1).max().item() * size.item()


def ascended(f: ls.SelfAttention, X: Tensor, domain: Domain, steps: int) -> Tensor:
    """X moved up the gradient of ||D_X f||_2 within the domain; X itself without a gradient."""
    best, top = X, -1.0
    Y = X.clone()
    for _ in range(steps):
        Z = Y.clone().requires_grad_(True)
        J = torch.func.jacrev(lambda z: naive_layer(f, z))(Z).reshape(-1, X.numel())
        size = J.detach().abs().max()
        if not size.isfinite() or size == 0:
            return best
        U, S, Vh = torch.linalg.svd((J / size).detach(), full_matrices=False)
        if S[0].item() * size.item() > top:
            best, top = Y, S[0].item() * size.item()
        (gradient,) = torch.autograd.grad(U[:, 0] @ (J / size) @ Vh[0], Z)
        if not gradient.isfinite().all() or gradient.norm() == 0:
            return best
        scale = X.norm() if not isinstance(domain, Around) else torch.tensor(domain.r).double()
        Y = inside(Y + 0.3 * scale * gradient / gradient.norm(), domain)
    return best


def inside(Y: Tensor, domain: Domain) -> Tensor:
    """Y projected back into the domain."""
    if isinstance(domain, Ball):
        return Y * (domain.R / Y.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp(max=1.0)
    if isinstance(domain, Around):
        E = Y - domain.X
        return domain.X + E * (domain.r / E.norm().clamp_min(1e-300)).clamp(max=1.0)
    return Y


def configurations(X: Tensor, R: float, g: Generator) -> Iterator[Tensor]:
    """The papers' worst cases: one against a crowd, 0 among +-R, equal tokens, a scaled X."""
    n, d = X.shape
    u = torch.randn(d, generator=g, dtype=torch.float64)
    u = u / u.norm()
    for crowd in (-1.0, 0.5, -0.3):
        Y = crowd * u.repeat(n, 1)
        Y[0] = u
        yield R * Y
    Y = torch.where(torch.arange(n)[:, None] % 2 == 0, u, -u)
    Y[-1] = 0
    yield R * Y
    yield R * u.repeat(n, 1)
    yield X * (R / X.norm(dim=1).max().clamp_min(1e-300))


def domains(X: Tensor) -> list[Domain]:
    R = max(X.norm(dim=1).max().item() * (1 + 1e-12), 1e-200)
    n = len(X)
    return [Point(X), Ball(R, n), Around(X, 1e-3 * R), Around(X, 0.2 * R), Everywhere(n)]


def members(
    f: ls.SelfAttention, X: Tensor, domain: Domain, g: Generator, effort: Effort
) -> Iterator[Tensor]:
    """Inputs of the domain: given, random, constructed, ascended."""
    yield X
    if isinstance(domain, Point):
        return
    if isinstance(domain, Around):
        for _ in range(effort.random):
            E = torch.randn(X.shape, generator=g, dtype=torch.float64)
            yield X + domain.r * E / E.norm()
    else:
        R = domain.R if isinstance(domain, Ball) else 3 * X.norm(dim=1).max().item() + 1e-200
        yield from (inside(Y, domain) for Y in configurations(X, R, g))
        for _ in range(effort.random):
            Y = torch.randn(X.shape, generator=g, dtype=torch.float64)
            yield R * Y / Y.norm(dim=1).max()
    yield ascended(f, X, domain, effort.steps)


def relative_slack(f: ls.SelfAttention, X: Tensor) -> float:
    """The rounding error of the dense Jacobian itself, in float64."""
    rounding = float(ls.jacobian(f, X).stated_rounding)
    return rounding if math.isfinite(rounding) else math.inf


def audit(f: ls.SelfAttention, X: Tensor, seed: int, tally: Tally, effort: Effort) -> None:
    """Every bound whose hypotheses hold, on every kind of domain, against inputs of the domain."""
    g = Generator().manual_seed(seed)
    for domain in domains(X):
        offered = []
        for bound in REGISTRY:
            within = enclosing(domain, bound.domain, bound.kind)
            if within is not None and failed_hypothesis(bound, f, within) is None:
                offered.append((bound, evaluate(bound, f, within), within))
        for Y in members(f, X, domain, g, effort) if offered else ():
            J, off = dense_jacobian(f, Y), relative_slack(f, Y)
            for norm in sorted({bound.norm for bound, _, _ in offered}):
                truth = measured(norm, f, Y, J, g)
                for bound, value, _ in offered:
                    if bound.norm == norm and bound.kind == "upper":
                        where = f"{bound.name} on {type(domain).__name__}"
                        assert truth <= value + off * truth, f"{where}: {truth} > {value}"
                        tally.note(bound, truth / value if value > 0 else 0.0)
        for bound, value, within in offered:
            if bound.kind == "lower":
                _check_lower(bound, value, f, within, offered, tally)


def _check_lower(bound: Bound, value: float, f, domain: Domain, offered, tally: Tally) -> None:
    """A lower bound is below every upper one and below sigma, and attained at its witness."""
    for other, above, _ in offered:
        if other.kind == "upper" and other.norm == bound.norm:
            assert value <= above, f"{bound.name} gives {value}, {other.name} {above}"
    Y = (
        domain.X
        if isinstance(domain, Point)
        else None
        if bound.witness is None
        else bound.witness(f, domain)
    )
    if Y is not None:
        assert (
            torch.equal(inside(Y, domain), Y) or (inside(Y, domain) - Y).norm() <= 1e-14 * Y.norm()
        )
        truth = measured(bound.norm, f, Y, dense_jacobian(f, Y), Generator())
        assert value <= truth * (1 + relative_slack(f, Y)), f"{bound.name}: {value} > {truth}"
        tally.note(bound, value / truth if truth > 0 else 0.0)
