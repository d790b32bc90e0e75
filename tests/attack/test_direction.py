"""Along the top singular direction the change per step tends to sigma, the best possible."""

import pytest
import torch

from lipscope._types import UserError
from lipscope.attack.direction import ETAS, singular_response
from tests.cases import KINDS, problem


@pytest.mark.parametrize("kind", list(KINDS))
def test_small_steps_show_sigma(kind):
    f, X = problem(kind, 1)
    f, X = f.double(), X.double()
    found = singular_response(f, X)
    assert found.etas == ETAS and found.etas[0] == 1e-6
    # Rounding of f costs 1e-16 |f| / eta, its curvature a multiple of eta.
    slack = 1e-4 * found.sigma.value + 1e-8 * f(X).abs().max().item()
    assert min(abs(r - found.sigma.value) for r in found.ratios[:3]) <= slack


def test_no_random_direction_does_better_for_a_small_step():
    f, X = problem("gaussian", 2)
    g = torch.Generator().manual_seed(0)
    found = singular_response(f, X, (1e-5,))
    for _ in range(20):
        E = torch.randn(X.shape, generator=g, dtype=X.dtype)
        assert (f(X + 1e-5 * E / E.norm()) - f(X)).norm() / 1e-5 < found.ratios[0] * (1 + 1e-3)
    assert found.direction.norm().item() == pytest.approx(1)


def test_a_linear_map_has_the_same_ratio_at_every_step():
    W = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    found = singular_response(lambda X: X @ W, torch.ones(4, 2, dtype=torch.float64))
    assert found.ratios == pytest.approx([3.0] * 7, rel=1e-8) and found.opposite == pytest.approx(
        [3.0] * 7, rel=1e-8
    )


@pytest.mark.parametrize("etas", [(), (0.0,), (1e-3, -1.0)])
def test_steps_must_be_positive(etas):
    f, X = problem("gaussian", 0)
    with pytest.raises(UserError, match="etas must be positive"):
        singular_response(f, X, etas)


def test_one_input_at_a_time():
    with pytest.raises(UserError, match="one input"):
        singular_response(lambda X: X, torch.ones(2, 3, 4))
