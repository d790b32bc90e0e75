"""Invertible residuals: reconstruction, error bounds, steps, and dense log-determinants."""

import itertools
import math

import mpmath
import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.nn.contractive import ContractiveMLP
from lipscope.nn.invertible import power_series, remainder, series_weights, theory_steps
from lipscope.nn.parametrize import SpectralNormalised
from tests.train.watched import unchecked


def residual(
    constant: float, seed: int = 0, norm: str = "2", causal: bool = False
) -> ls.nn.InvertibleResidual:
    torch.manual_seed(seed)
    return ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, 2, constant, norm, causal))


class Turn(nn.Module):
    """x -> c x rotated by 90 degrees in every pair of coordinates: it attains its constant."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        return self.constant * torch.stack([-x[..., 1], x[..., 0]], dim=-1)


class Named(nn.Identity):
    """Something with attributes."""

    def __init__(self, constant: object, norm: object = 2) -> None:
        super().__init__()
        self.constant, self.norm = constant, norm


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("constant", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("size", [0.3, 3.0])
def test_float32_tokens_come_back(constant, norm, size):
    for causal in (False, True):
        r = residual(constant, norm=norm, causal=causal)
        X = size * torch.randn(3, 12, 8)
        found = r.inverse(r(X))
        assert (found.value - X).abs().max() < 1e-5 and (found.value - X).norm() / X.norm() < 1e-6
        assert found.error_bound.shape == found.steps.shape == (3,)


def exact_inverse(r: ls.nn.InvertibleResidual, y: Tensor) -> Tensor:
    """Far more float64 steps than are needed: the local rate is below 0.1."""
    r, y = r.double(), y.double()
    x = y
    for _ in range(100):
        x = y - r.g(x)
    return x.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_the_error_bound_covers_the_error_in_its_norm(norm, dtype):
    r, y = residual(0.9, 1, norm).to(dtype), torch.randn(4, 6, 8).to(dtype)
    found = r.inverse(y)
    error = (found.value.double() - exact_inverse(r, y)).flatten(1)
    error = error.abs().amax(1) if norm == "inf" else error.norm(dim=1)
    assert (error <= found.error_bound).all()
    assert (
        found.error_bound < 2000 * torch.finfo(dtype).eps * y.flatten(1).double().norm(dim=1)
    ).all()


@pytest.mark.parametrize("constant", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_map_that_attains_its_constant_takes_the_steps_of_theory(constant, dtype):
    """Every step shrinks by exactly c until rounding; the value is (x - g(x)) / (1 + c^2)."""
    r = ls.nn.InvertibleResidual(Turn(constant))
    y = torch.randn(5, 3, 2).to(dtype)
    found = r.inverse(y)
    first = r.g(y).flatten(1).norm(dim=1)
    goal = torch.finfo(dtype).eps * (y.flatten(1).norm(dim=1) + first)
    theory = theory_steps(constant, first, goal)
    assert (found.steps <= theory).all() and (found.steps >= 0.5 * theory).all()
    exact = (y.double() - Turn(constant)(y.double())) / (1 + constant**2)
    error = (found.value - exact).flatten(1).norm(dim=1)
    assert (error <= found.error_bound).all()
    assert (error <= 20 / (1 - constant) * torch.finfo(dtype).eps * y.flatten(1).norm(dim=1)).all()


def test_the_members_of_a_batch_do_not_know_each_other():
    r = residual(0.9)
    y = torch.cat([torch.randn(1, 6, 8), 100 * torch.randn(1, 6, 8), torch.zeros(1, 6, 8)])
    together = r.inverse(y)
    for i in range(3):
        alone = r.inverse(y[i])
        assert alone.steps.shape == () and alone.steps == together.steps[i]
        torch.testing.assert_close(alone.value, together.value[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.DotSelfAttention(8, 2)),
            "states no Lipschitz constant",
        ),
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.DotSelfAttention(8, 2), 0.5),
            "has no Lipschitz constant for any weights",
        ),
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.L2SelfAttention(8, 2), 0.5),
            "with its current weights the bound is .* at 2 tokens",
        ),
        (
            lambda: ls.nn.InvertibleResidual(residual(0.9)),
            "its constant is 1.9, that of its own g is 0.9",
        ),
        (lambda: ls.nn.InvertibleResidual(residual(0.9), 0.95), "in sequence"),
        (
            lambda: ls.nn.InvertibleResidual(nn.DataParallel(residual(0.9)), 0.95),
            "in sequence",
        ),
        (
            lambda: ls.nn.InvertibleResidual(SpectralNormalised(0.5)),
            "is a parametrization of weights",
        ),
        (lambda: ls.nn.InvertibleResidual(Named("0.5")), "strictly between 0 and 1, got '0.5'"),
        (lambda: ls.nn.InvertibleResidual(Named(0.5, norm="1")), "norm must be .* got '1'"),
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, 2, 1.0)),
            "strictly between 0 and 1, got 1.0",
        ),
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, 2, 0.5), 1),
            "strictly between 0 and 1, got 1",
        ),
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, 2, 0.5), -0.5),
            "strictly between 0 and 1",
        ),
        (
            lambda: ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, 2, 0.9), 0.5),
            "below the constant 0.9",
        ),
        (
            lambda: residual(0.5).inverse(torch.full((3, 8), math.nan)),
            r"X holds nan at index \[0, 0\]",
        ),
        (lambda: residual(0.5).inverse(torch.randn(3, 7)), "got torch.float32"),
        (
            lambda: residual(0.5).log_det(torch.randn(3, 8), terms=0),
            "terms must be a positive integer",
        ),
    ],
)
def test_errors_say_what_to_do(make, words):
    with pytest.raises(ls.UserError, match=words):
        make()


@pytest.mark.parametrize("g", [lambda x: 0.5 * x, torch.tanh])
def test_a_plain_function_is_refused_at_once(g):
    with (
        unchecked(),
        pytest.raises(ls.UserError, match=r"must be a torch.nn.Module.* got .*function"),
    ):
        ls.nn.InvertibleResidual(g, 0.5)


def test_broken_weights_are_named():
    r = residual(0.5)
    torch.nn.init.constant_(r.g.out.weight, math.nan)
    with pytest.raises(ls.UserError, match="look for NaN in its weights"):
        r.inverse(torch.randn(3, 8))


def test_a_norm_layer_inside_g_is_no_norm():
    g = nn.Linear(4, 4)
    g.norm = nn.LayerNorm(4)
    assert ls.nn.InvertibleResidual(g, 0.5).norm == "2"


def test_a_constant_that_changes_is_read_again():
    r = residual(0.5)
    r.g.constant = 0.7
    assert r.constant == 0.7 and "constant=0.7" in repr(r)
    assert r.log_det(torch.randn(3, 8), terms=4).remainder == pytest.approx(remainder(0.7, 4, 24))
    r.g.constant = 3.0
    for use in (r.inverse, r.log_det):
        with pytest.raises(ls.UserError, match="strictly between 0 and 1, got 3"):
            use(torch.randn(3, 8))


def dense_log_det(r: ls.nn.InvertibleResidual, x: Tensor) -> Tensor:
    J = torch.autograd.functional.jacobian(r, x, create_graph=True).reshape(x.numel(), x.numel())
    return torch.linalg.slogdet(J)[1]


class Bend(nn.Module):
    """0.8 W tanh(x), ||W|| = 1: what a contraction can do to a determinant."""

    constant = 0.8

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(3, 3) + 2 * torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return 0.8 / torch.linalg.matrix_norm(self.W, 2) * torch.tanh(x) @ self.W.T


def problems() -> list[tuple[ls.nn.InvertibleResidual, Tensor]]:
    torch.manual_seed(0)
    attention = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(2, 1, 0.8)).double()
    return [
        (ls.nn.InvertibleResidual(Bend()).double(), 0.5 * torch.randn(3, 2, 3).double()),
        (attention, 0.3 * torch.randn(2, 3, 2).double()),
    ]


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_log_det_is_that_of_the_dense_jacobian(unbiased, which):
    r, x = problems()[which]
    torch.manual_seed(1)
    found = r.log_det(x, terms=3 if unbiased else 40, probes=2000, unbiased=unbiased)
    exact = torch.stack([dense_log_det(r, one) for one in x]).detach()
    assert found.remainder < 1e-3
    assert ((found.value - exact).abs() <= 4.5 * found.standard_error + found.remainder).all()
    assert (found.standard_error < 0.02 * (1 + exact.abs())).all()


@pytest.mark.parametrize("which", [0, 1])
def test_the_default_log_det_is_within_its_own_errors(which):
    r, x = problems()[which]
    torch.manual_seed(2)
    found = r.log_det(x)
    exact = torch.stack([dense_log_det(r, one) for one in x]).detach()
    assert 0 < found.remainder <= 0.01 and found.terms == found.terms_needed
    assert found.standard_error.isfinite().all()
    # Student's t with 3 degrees of freedom: 4 probes.
    assert ((found.value - exact).abs() <= 13 * found.standard_error + found.remainder).all()
    fine = r.log_det(x, probes=4000, tol=1e-6)
    assert fine.terms > found.terms and fine.remainder <= 1e-6
    assert ((fine.value - exact).abs() <= 4.5 * fine.standard_error + fine.remainder).all()


def test_log_det_says_how_many_terms_it_needs():
    r, x = residual(0.9), torch.randn(3, 8)
    few = r.log_det(x, terms=4)
    assert few.terms == 4 and few.remainder > 0.01
    assert few.terms_needed == next(m for m in range(1, 999) if remainder(0.9, m, 24) <= 0.01)
    assert f"terms_needed={few.terms_needed}" in repr(few)
    slow = ls.nn.InvertibleResidual(Turn(0.999)).log_det(torch.randn(3, 2))
    assert slow.terms == 256 < slow.terms_needed and slow.remainder > 0.01
    assert r.log_det(x, unbiased=True).terms == 8
    with pytest.raises(ls.UserError, match="tol must be a positive number"):
        r.log_det(x, tol=0.0)


@pytest.mark.parametrize("which", [0, 1])
def test_all_sign_vectors_give_the_series_and_its_gradient_exactly(which):
    """The mean of v'J^k v over all v is tr J^k."""
    r, x = problems()[which]
    x = x[0].requires_grad_(True)
    weights = [x, *r.parameters()]
    signs = (
        torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6))).double().reshape(-1, *x.shape)
    )
    series = power_series(r.g, x, signs, series_weights(90, 64, 0.0), keep=True).mean()
    exact = dense_log_det(r, x)
    assert series.item() == pytest.approx(exact.item(), rel=1e-9)
    for a, b in zip(
        torch.autograd.grad(series, weights), torch.autograd.grad(exact, weights), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        assert not r.log_det(x, terms=2).value.requires_grad


def test_the_roulette_is_fair():
    """The mean weight of every term is the weight of the series."""
    torch.manual_seed(0)
    drawn = series_weights(2, 200_000, 0.6)
    for k in range(1, 8):
        mean, spread = drawn[k - 1].mean(), drawn[k - 1].std() / math.sqrt(200_000)
        assert abs(mean - (-1) ** (k + 1) / k) <= 5 * spread + 1e-6


def test_the_remainder_bounds_what_is_cut_off():
    """For c times a rotation, eigenvalues have modulus c, and the series is summed exactly."""
    for c, terms in ((0.5, 1), (0.9, 4), (0.9, 15)):
        k = torch.arange(1, 4000, dtype=torch.float64)
        for phase in (0.0, 1.0, math.pi):
            series = 6 * (-1) ** (k + 1) / k * c**k * torch.cos(k * phase)
            assert abs(series[terms:].sum()) <= remainder(c, terms, 6)
    assert remainder(0.9, 4, 6) == pytest.approx(6 * 0.9**5 / 5 / 0.1)


def padded_tokens():
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2)).double()
    real = torch.ones(3, 6, dtype=torch.bool)
    real[0, 4:] = real[2, :3] = False
    return x.masked_fill(~real[..., None], math.nan), real


@pytest.mark.wide
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_padded_sequences_invert_as_they_do_alone(norm):
    torch.manual_seed(0)
    r = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(4, 2, 0.9, norm)).double()
    x, real = padded_tokens()
    y = r(x, real)
    found = r.inverse(y, real)
    assert torch.equal(y.isnan(), x.isnan()) and torch.equal(found.value.isnan(), x.isnan())
    assert (found.value - x)[real].abs().max() < 1e-13 and found.error_bound.max() < 1e-10
    for i, own in enumerate(real):
        torch.testing.assert_close(y[i, own], r(x[i, own]), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            found.value[i, own], r.inverse(y[i, own]).value, rtol=1e-12, atol=1e-13
        )


def test_padded_tokens_have_no_part_in_the_determinant():
    torch.manual_seed(0)
    r = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(4, 1, 0.9)).double()
    with torch.no_grad():
        r.g.query.weight.mul_(3)
    x, real = padded_tokens()
    x.requires_grad_(True)
    found = r.log_det(x, terms=20, probes=64, padding=real)
    for i, own in enumerate(real):
        alone = x[i, own].detach()
        J = torch.autograd.functional.jacobian(r, alone).reshape(alone.numel(), -1)
        truth = torch.linalg.slogdet(J).logabsdet
        assert (found.value[i] - truth).abs() < 5 * found.standard_error[i] + 1e-6
    (gradient,) = torch.autograd.grad(found.value.sum(), x)
    assert (
        gradient.isfinite().all()
        and (gradient[~real] == 0).all()
        and gradient[real].abs().min() > 0
    )
    with pytest.raises(ls.UserError, match="padding is for attention, and g is a ContractiveMLP"):
        ls.nn.InvertibleResidual(ContractiveMLP(4, 8, 0.5)).double()(x, real)
    with pytest.raises(ls.UserError, match="padding must be a boolean tensor"):
        r.inverse(x.detach(), real[:2])


@pytest.mark.parametrize("size", [1e4, 1e7, 1e10])
def test_large_intermediates_are_inside_the_error_bound(size):
    """sin(x + b) / 2, whose sum loses digits that x does not show; the truth in 50 digits."""

    class Shifted(torch.nn.Module):
        constant = 0.5

        def forward(self, x):
            return 0.5 * torch.sin(x + size)

    mp = mpmath.mp.clone()
    mp.dps = 50
    for seed in range(4):
        y = torch.randn(1, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = ls.nn.InvertibleResidual(Shifted()).inverse(y)
        error = mp.mpf(0)
        for target, x in zip(y[0].tolist(), found.value[0].tolist(), strict=True):
            exact = mp.mpf(target)
            for _ in range(170):
                exact = target - mp.sin(exact + size) / 2
            error += (exact - x) ** 2
        assert mp.sqrt(error) <= float(found.error_bound) < 1e-12 * size + 1e-10
