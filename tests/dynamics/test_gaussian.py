"""Gaussians: the tilted mean by quadrature, moments by closed forms and particles, blow-up."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import lipscope as ls
from lipscope.dynamics.gaussian import affine_velocity
from lipscope.dynamics.integration import Ending
from tests.dynamics.problems import draw, identity, random_head, two_heads, types_unchecked
from tests.mean_field.weighted import velocity

A = torch.tensor([[0.5, 0.3], [-0.2, 0.4]], dtype=torch.float64)
V = torch.tensor([[0.6, -0.1], [0.2, 0.5]], dtype=torch.float64)
ALPHA = torch.tensor([0.3, -0.2], dtype=torch.float64)
ROOT = torch.tensor([[0.8, 0.0], [0.3, 0.6]], dtype=torch.float64)
SIGMA = ROOT @ ROOT.T
HEAD = ls.SelfAttention(A, torch.eye(2, dtype=torch.float64), V, kernel=ls.Dot(scale=1.0))


def quadrature() -> ls.mean_field.DiscreteMeasure:
    """N(ALPHA, SIGMA) as 60 x 60 weighted points, exact for polynomials of degree 119."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid = torch.from_numpy(np.array(np.meshgrid(nodes, nodes)).reshape(2, -1).T.copy())
    mass = torch.from_numpy(np.outer(weights, weights).ravel())
    kept = mass > 1e-250
    return ls.mean_field.DiscreteMeasure(ALPHA + grid[kept] @ ROOT.T, mass[kept] / mass[kept].sum())


@pytest.mark.parametrize(
    "f", [HEAD, two_heads(2), two_heads(2, kernel=ls.L2(scale=0.4))], ids=["one", "two", "L2"]
)
def test_the_velocity_is_affine_with_the_stated_coefficients(f):
    M, c = affine_velocity(f)(ALPHA, SIGMA)
    x = draw(6, 2)
    assert torch.allclose(velocity(f, quadrature())(x), x @ M.T + c, rtol=1e-9, atol=1e-9)


def test_the_moments_against_scipy():
    def rhs(t: float, y: np.ndarray) -> np.ndarray:
        a, S, Vn, An = y[:2], y[2:].reshape(2, 2), V.numpy(), A.numpy()
        return np.r_[Vn @ (a + S @ An @ a), (Vn @ S @ An @ S + S @ An.T @ S @ Vn.T).ravel()]

    start = np.r_[ALPHA.numpy(), SIGMA.numpy().ravel()]
    exact = solve_ivp(rhs, (0, 1), start, rtol=1e-12, atol=1e-12, method="DOP853").y[:, -1]
    found = ls.dynamics.gaussian_flow(HEAD, ALPHA, SIGMA, 1.0)
    assert found.ok and torch.allclose(found.means[-1], torch.from_numpy(exact[:2]), rtol=1e-8)
    assert torch.allclose(found.covariances[-1].flatten(), torch.from_numpy(exact[2:]), rtol=1e-8)


def test_scalar_values_in_closed_form_with_their_blow_up():
    """V = v I: the inverse covariance falls on a line, Sigma^-1(t) = Sigma_0^-1 - v t (A + A')."""
    v = 0.7
    f = ls.SelfAttention(
        A,
        torch.eye(2, dtype=torch.float64),
        v * torch.eye(2, dtype=torch.float64),
        kernel=HEAD.kernel,
    )
    found = ls.dynamics.gaussian_flow(f, ALPHA, SIGMA, 100.0, frames=1000)
    line = SIGMA.inverse() - v * found.times[:-1, None, None] * (A + A.T)
    assert torch.allclose(found.covariances[:-1], line.inverse(), rtol=1e-5)
    expected = 1 / (v * torch.linalg.eigvals(SIGMA @ (A + A.T)).real.max().item())
    assert found.ending is Ending.BLOW_UP and found.blow_up == pytest.approx(expected, rel=1e-7)
    assert f"{found.blow_up:.9g}" in found.summary and found.covariances.isfinite().all()


def test_negative_values_blow_up_where_scores_repel():
    """t* = 1 / lambda_max(v S (A + A')), S = Sigma_0, not 1 / (v lambda_max(S (A + A')))."""
    v, B = -0.7, torch.tensor([[0.5, 0.3], [-0.2, -0.9]], dtype=torch.float64)
    I = torch.eye(2, dtype=torch.float64)
    found = ls.dynamics.gaussian_flow(
        ls.SelfAttention(B, I, v * I, kernel=HEAD.kernel), ALPHA, SIGMA, 100.0
    )
    expected = 1 / torch.linalg.eigvals(v * SIGMA @ (B + B.T)).real.max().item()
    assert found.ending is Ending.BLOW_UP and found.blow_up == pytest.approx(expected, rel=1e-7)


def test_steps_may_be_raised_as_the_status_advises():
    short = ls.dynamics.gaussian_flow(HEAD, ALPHA, SIGMA, 0.5, max_steps=3)
    assert short.ending is Ending.MAX_STEPS and "raise max_steps" in short.summary
    assert ls.dynamics.gaussian_flow(HEAD, ALPHA, SIGMA, 0.5, max_steps=3000).ok


def test_learned_moments_and_weights_may_require_gradients():
    f = ls.SelfAttention(
        A, torch.eye(2, dtype=torch.float64), V.clone().requires_grad_(), kernel=HEAD.kernel
    )
    found = ls.dynamics.gaussian_flow(f, ALPHA, SIGMA.clone().requires_grad_(), 0.5)
    assert not found.covariances.requires_grad
    assert torch.equal(
        found.covariances, ls.dynamics.gaussian_flow(HEAD, ALPHA, SIGMA, 0.5).covariances
    )


@pytest.mark.parametrize("a", [0.5, -0.5])
def test_one_dimension_in_closed_form(a):
    """Sigma(t) = Sigma_0 / (1 - 2 V A Sigma_0 t): infinite at 1/(2 V A Sigma_0), or never."""
    f, sigma = identity(1, scale=a), torch.tensor([[2.0]], dtype=torch.float64)
    found = ls.dynamics.gaussian_flow(
        f, torch.zeros(1, dtype=torch.float64), sigma, 3.0, frames=301
    )
    before = found.times < 0.49 if a > 0 else found.times >= 0
    exact = 2 / (1 - 2 * a * 2 * found.times)
    assert torch.allclose(found.covariances[before, 0, 0], exact[before], rtol=1e-6)
    assert found.blow_up is None if a < 0 else found.blow_up == pytest.approx(0.5, rel=1e-7)


def test_tokens_move_by_the_affine_maps():
    """Each of many particles goes where the limit sends it, up to the error of the sample."""
    found = ls.dynamics.gaussian_flow(HEAD, ALPHA, SIGMA, 0.5)
    X = ALPHA + draw(2000, 2) @ ROOT.T
    moved = ls.dynamics.flow(HEAD, X, 0.5, tol=1e-5).positions[-1]
    expected = found.means[-1] + (X - ALPHA) @ found.maps[-1].T
    assert (moved - expected).norm(dim=1).mean() < 0.05 * (expected - X).norm(dim=1).mean()


def moments(x: torch.Tensor) -> torch.Tensor:
    covariance = x.T.cov(correction=0)
    return torch.stack([*x.mean(0), *covariance[0], covariance[1, 1]])


def errors(n: int, seeds: range, time: float = 0.8, f: ls.SelfAttention = HEAD) -> torch.Tensor:
    """Moments of n particles less those of the closed equation, for each seed: [seeds, 5]."""
    closed = ls.dynamics.gaussian_flow(f, ALPHA, SIGMA, time)
    exact = torch.stack(
        [*closed.means[-1], *closed.covariances[-1][0], closed.covariances[-1][1, 1]]
    )
    starts = (ALPHA + draw(n, 2, seed=seed) @ ROOT.T for seed in seeds)
    return torch.stack(
        [moments(ls.dynamics.flow(f, X, time, tol=1e-4).positions[-1]) - exact for X in starts]
    )


def test_particles_have_the_moments_of_the_closed_equation():
    """Over 40 samples of 300, the mean error is within 4 standard errors, and these are small."""
    found = errors(300, range(40))
    spread = found.std(0)
    assert (found.mean(0).abs() < 4 * spread / math.sqrt(40)).all()
    assert (spread < 4 / math.sqrt(300)).all()


def test_masked_particles_have_them_too():
    """Tokens of one law at every position: the mask makes no difference in the limit."""
    f = ls.SelfAttention(A, torch.eye(2, dtype=torch.float64), V, causal=True, kernel=HEAD.kernel)
    found = errors(200, range(30), 0.5, f)
    closed, masked = (
        ls.dynamics.gaussian_flow(g, ALPHA, SIGMA, 0.5).covariances for g in (HEAD, f)
    )
    assert torch.equal(closed, masked)
    # The first tokens see few others: an error of order log(n)/n beside that of the sample.
    assert (found.mean(0).abs() < 4 * found.std(0) / math.sqrt(30) + 2 * math.log(200) / 200).all()


SPD = torch.eye(2, dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)
WRONG = {
    "time": ({"time": -1.0}, "time"),
    "frames": ({"frames": 1}, "frames"),
    "half a frame": ({"frames": 2.5}, "frames"),
    "tolerance": ({"tol": "fine"}, "tolerance"),
    "mean": ({"mean": ZERO[:1]}, r"mean must be a tensor of shape \(2,\)"),
    "covariance": ({"covariance": SPD[:1]}, "covariance must be a tensor"),
    "asymmetric": ({"covariance": SPD + SPD.flip(0).tril()}, "symmetric"),
    "negative": ({"covariance": SPD - 3}, "negative eigenvalue"),
    "NaN": ({"mean": ZERO / 0}, "nan at index"),
    "dtype": ({"mean": ZERO.float()}, "convert"),
    "softcap": ({"f": random_head(2, kernel=ls.Dot(softcap=1.0))}, "softcap"),
    "V not square": ({"f": ls.SelfAttention(A, A, draw(3, 2))}, "equal"),
    "window": ({"f": random_head(2, causal=True, window=3)}, "window"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    options, told = WRONG[name]
    options = {"f": HEAD, "mean": ZERO, "covariance": SPD, "time": 1.0} | options
    with types_unchecked(), pytest.raises(ls.UserError, match=told):
        ls.dynamics.gaussian_flow(**options)
