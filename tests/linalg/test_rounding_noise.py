"""Rounding measured by moving every operation: what is moved, and what is named instead."""

import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope.linalg.rounding_noise import DRAWS, WIDENED, RoundingNoise, _same
from tests.campaigns import edges
from tests.campaigns.runner import Result


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("number", range(len(edges.CLASSES)))
def test_edges(number: int):
    """A few cases of each class of the campaign."""
    result = Result()
    for seed in range(number, 40 * len(edges.CLASSES), 4 * len(edges.CLASSES)):
        edges.CLASSES[number](edges.Draw(seed), result)
    assert result.faults == [] and not result.total()["false"]


@pytest.mark.parametrize("step", edges.EVERY, ids=lambda step: getattr(step, "__name__", "out="))
def test_each_step_moves_by_the_rounding_of_its_largest_number(step):
    """Adding 1e8 loses eight digits of the scores; the spread of the result must show it."""
    s = draw(4, 4)
    spread = 0.0
    for seed in range(3):
        with torch.no_grad(), RoundingNoise(seed):
            # An operation makes the scores, as they are the map's own.
            y = torch.softmax(step(s * 1.0, 1e8), -1)
        spread = max(spread, (y - torch.softmax(s, -1)).abs().max().item())
    assert 1e-9 < spread < 1e-6


def test_views_and_constants_stay():
    X = draw(3, 4)
    with torch.no_grad(), RoundingNoise(0):
        assert torch.equal(X.view(12)[4:8], X[1])
        assert torch.equal(torch.ones(3).fill_(0.1), torch.full((3,), 0.1))
        assert not torch.equal(X * 1, X)


def test_numbers_of_the_caller_are_restored():
    kept = draw(4)
    before = kept.clone()
    with torch.no_grad(), RoundingNoise(0):
        kept[1:].mul_(3.0)
        kept.add_(1.0)
    assert torch.equal(kept, before)
    norm = torch.nn.BatchNorm1d(4).double().eval()
    before = norm.running_mean.clone()
    ls.local_lipschitz(norm, draw(3, 4))
    assert torch.equal(norm.running_mean, before)


class Foreign(torch.autograd.Function):
    """(x + 1e9) - 1e9, computed by another library."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy((x.detach().numpy() + 1e9) - 1e9)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class Kernel(torch.autograd.Function):
    """The same by a kernel that writes memory behind torch's back."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        np.copyto(y.numpy(), (x.detach().numpy() + 1e9) - 1e9)
        return y

    @staticmethod
    def backward(ctx, g):
        return g.clone()


torch.library.define("lipscope_tests::lose", "(Tensor x) -> Tensor")
torch.library.impl("lipscope_tests::lose", "CPU")(lambda x: (x + 1e9) - 1e9)


class Operator(torch.autograd.Function):
    """The same by an operator of another library."""

    @staticmethod
    def forward(ctx, x):
        return torch.ops.lipscope_tests.lose(x)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


@pytest.mark.parametrize(
    ("f", "named"),
    [
        (lambda X: torch.sin(Foreign.apply(X)), "numbers leave torch and come back"),
        (lambda X: X * ((X.sum().item() + 1e9) - 1e9), "numbers leave torch and come back"),
        (lambda X: torch.sin(Kernel.apply(X)), "filled by a kernel outside torch"),
        (lambda X: torch.sin(Operator.apply(X)), "lipscope_tests::lose"),
    ],
    ids=["numpy", "item", "kernel", "operator"],
)
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_what_cannot_be_moved_is_named_and_nothing_is_claimed(f, named, norm):
    e = ls.local_lipschitz(f, draw(3, 2), norm=norm)
    assert e.lower == 0 and e.upper == math.inf and e.confidence == 0
    assert named in e.note and e.status is ls.Status.IMPRECISE and math.isfinite(e.value)


@pytest.mark.parametrize(
    "f",
    [
        lambda X: X * torch.tensor([0.3, 0.7], dtype=torch.float64),
        lambda X: X * draw(3).sum().item(),
        lambda X: X @ torch.from_numpy(np.eye(2)),
        lambda X: checkpoint(torch.sin, X, use_reentrant=False),
    ],
    ids=["constant", "scalar of weights", "numpy constant", "checkpoint"],
)
def test_constants_made_inside_a_map_are_no_doubt(f):
    e = ls.local_lipschitz(f, draw(3, 2), gap=0.01)
    assert e.status.ok and e.lower > 0.99 * e.value and e.upper < 1.01 * e.value


def test_a_map_that_fails_when_moved_has_a_value_and_no_bounds():
    def f(X):
        return X[:, : int(torch.ones(3, dtype=torch.float64).sum() + 0 * X.sum())] * 2

    found = [ls.local_lipschitz(f, draw(3, 4, seed=seed)) for seed in range(4)]
    assert all(e.value == pytest.approx(2.0) for e in found)
    assert any("when its numbers move" in e.note and e.lower == 0 for e in found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_map_is_right_or_refused(backend):
    A, X = draw(2, 2), draw(3, 2, seed=1)
    f = edges.attention(A, A, edges.add_in_place, 1e8)
    truth = edges.norm(edges.attention(A, A, edges.plain, 0.0), X)
    try:
        e = ls.local_lipschitz(torch.compile(f, backend=backend), X, gap=0.01)
    except ls.UserError as error:
        assert "cannot be differentiated twice" in str(error)
    else:
        assert e.lower <= truth <= e.upper


def test_unseen_rounding_of_an_inverse_leaves_no_bound():
    class G(torch.nn.Module):
        constant = 0.5

        def forward(self, x):
            return 0.5 * torch.sin(Foreign.apply(x))

    found = ls.nn.InvertibleResidual(G()).inverse(draw(2, 3))
    assert found.error_bound == math.inf


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (2.0, 2.0, True), (2.0, 3.0, False), (2.0, torch.tensor(2.0), True),
        (torch.tensor(2.0), 3.0, False), (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(3), False), (torch.ones(2), 2 * torch.ones(2), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
    ],
)  # fmt: skip
def test_numbers_from_outside_a_map_are_compared_by_value_and_kind(a, b, same):
    assert _same(a, b) == _same(b, a) == same


def test_numbers_move_by_15_units_in_the_root_mean_square_and_30_with_the_factor():
    """As the documentation has it: three draws of up to 26 units, widened twice."""
    x = torch.ones(100_000, dtype=torch.float64)
    with RoundingNoise(0) as mode:
        mode.computed.add(x.untyped_storage()._cdata)
        moved = (x * 1.0 - 1.0).abs()
    # The two products and differences move one after the other; the second one hardly matters.
    units = moved / torch.finfo(torch.float64).eps
    assert 25 < units.max() < 27
    rms = units.square().mean().sqrt().item()
    assert rms == pytest.approx(15, rel=0.03) and WIDENED * rms == pytest.approx(30, rel=0.03)
    assert DRAWS == 3
