"""Perturbations have the requested norm; the gradient finds the singular direction where that is
best, and beats it where it is not."""

import math

import pytest
import torch

from lipscope._types import UserError
from lipscope.attack.perturbation import (
    ETAS,
    gradient_perturbations,
    output_changes,
    random_perturbations,
    singular_perturbations,
    singular_response,
)
from tests.cases import KINDS, problem
from tests.naive import dense_jacobian

RADII = (1e-4, 1e-2, 0.3, 2.0)


def every(f, X, radii, steps=40, **options):
    return {
        "random": random_perturbations(X, radii, **options),
        "singular": singular_perturbations(f, X, radii, **options),
        "gradient": gradient_perturbations(f, X, radii, steps=steps, **options),
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fully masked rows"])
def test_norms_are_exact_and_small_steps_show_sigma(kind):
    f, X = problem(kind, 3)
    f, X = f.double(), X.double()
    sigma = torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
    scale = X.norm().item() or 1.0
    radii = [r * scale for r in RADII]
    for name, E in every(f, X, radii, steps=5).items():
        assert E.norm(dim=(1, 2)).tolist() == pytest.approx(radii, rel=1e-9)
        changes = output_changes(f, X, E)
        truth = [math.hypot(*(f(X + e) - f(X)).flatten().tolist()) for e in E]
        assert changes.tolist() == pytest.approx(truth, rel=1e-6, abs=1e-12)
        if name == "singular" and sigma > 1e-6:
            assert changes[0].item() / radii[0] == pytest.approx(sigma, rel=0.05)


def test_the_gradient_finds_the_singular_direction_for_small_steps_and_more_for_large_ones():
    f, X = problem("gaussian", 2)
    found = {name: output_changes(f, X, E) for name, E in every(f, X, [1e-5, 1.0, 4.0]).items()}
    assert found["gradient"][0] == pytest.approx(found["singular"][0].item(), rel=1e-3)
    assert (found["gradient"][1:] > found["singular"][1:]).all()
    assert (found["singular"][:1] > found["random"][:1]).all() and (
        found["gradient"] > found["random"]
    ).all()


def test_of_two_signs_the_better_is_taken():
    def f(X):
        return torch.exp(X)

    X = torch.zeros(1, 1, dtype=torch.float64)
    E = singular_perturbations(f, X, [1.0])
    assert output_changes(f, X, E).item() == pytest.approx(math.e - 1)


def test_a_linear_map_changes_by_the_matrix():
    W = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    X = torch.ones(4, 2, dtype=torch.float64)
    for name, E in every(lambda x: x @ W, X, [0.5, 2.0]).items():
        changes = output_changes(lambda x: x @ W, X, E)
        assert changes.tolist() == pytest.approx((E @ W).norm(dim=(1, 2)).tolist())
        assert name == "random" or changes.tolist() == pytest.approx([1.5, 6.0], rel=1e-3)


@pytest.mark.parametrize("sizes", [[], [0.0], [1.0, -1.0], [math.inf], [math.nan]])
@pytest.mark.parametrize(
    "attack", [singular_perturbations, gradient_perturbations, singular_response]
)
def test_sizes_must_be_positive_and_inputs_single(attack, sizes):
    f, X = problem("gaussian", 0)
    with pytest.raises(UserError, match="must be positive"):
        attack(f, X, sizes)
    with pytest.raises(UserError, match="one input"):
        attack(f, X[None], [1.0])


@pytest.mark.parametrize("kind", list(KINDS))
def test_small_steps_show_sigma(kind):
    f, X = problem(kind, 1)
    f, X = f.double(), X.double()
    found = singular_response(f, X)
    assert found.etas == ETAS and found.etas[0] == 1e-6
    # Rounding of f costs 1e-16 |f| / eta, its curvature a multiple of eta.
    slack = 1e-4 * found.sigma.value + 1e-8 * f(X).abs().max().item()
    assert min(abs(r - found.sigma.value) for r in found.ratios[:3]) <= slack


def test_a_linear_map_has_the_same_ratio_at_every_step():
    W = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    found = singular_response(lambda X: X @ W, torch.ones(4, 2, dtype=torch.float64))
    assert found.ratios == pytest.approx([3.0] * 7, rel=1e-8) and found.opposite == pytest.approx(
        [3.0] * 7, rel=1e-8
    )
