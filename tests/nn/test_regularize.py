"""Penalties on weights and measured constants: values by definition, gradients by differences."""

import copy
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn import ATTENTIONS
from tests.train.watched import unchecked


def dense_sigma(m: nn.Module, X: torch.Tensor) -> torch.Tensor:
    def one(x):
        return torch.linalg.matrix_norm(
            torch.autograd.functional.jacobian(m, x).reshape(x.numel(), -1), 2
        )

    return torch.stack([one(x) for x in X])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_measured_constant_has_the_gradient_of_the_dense_norm(name):
    torch.manual_seed(0)
    m, X = (
        ATTENTIONS[name](4, 2, name != "l2").double(),
        torch.randn(2, 3, 4).double().requires_grad_(True),
    )
    sigma = ls.nn.measured_sigma(m, X, 1e-10)
    torch.testing.assert_close(sigma, dense_sigma(m, X.detach()), rtol=1e-9, atol=0)
    sigma.sum().backward()
    for variable in (X, *m.parameters()):
        direction, values = torch.randn_like(variable), []
        for step in (1e-5, -2e-5, 1e-5):
            with torch.no_grad():
                variable.add_(step * direction)
            values.append(dense_sigma(m, X.detach()).sum())
        expected = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(
            (variable.grad * direction).sum(), expected, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_bfloat16_layer_is_measured_in_float32(name):
    torch.manual_seed(0)
    m, X = ATTENTIONS[name](8, 2, True).bfloat16(), torch.randn(2, 5, 8).bfloat16()
    wide = copy.deepcopy(m).double()
    found, truth = ls.nn.measured_sigma(m, X), ls.nn.measured_sigma(wide, X.double())
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0)
    found.sum().backward()
    truth.sum().backward()
    for a, b in zip(m.parameters(), wide.parameters(), strict=True):
        assert a.grad.dtype == torch.bfloat16
        assert (a.grad.double() - b.grad).norm() < 0.02 * b.grad.norm() + 1e-6


@pytest.mark.wide
def test_the_penalty_lowers_the_constant_in_training_under_autocast():
    torch.manual_seed(0)
    m, X = ls.nn.DotSelfAttention(8, 2), 3 * torch.randn(2, 6, 8)
    before = ls.nn.measured_sigma(m, X).mean().item()
    optimiser = torch.optim.Adam(m.parameters(), 3e-2)
    for _ in range(8):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(X).square().mean() + 0.1 * ls.nn.measured_sigma(m, X).mean()
        loss.backward()
        optimiser.step()
    assert ls.nn.measured_sigma(m, X).mean().item() < 0.8 * before


def test_jasmin_is_its_definition():
    torch.manual_seed(0)
    P = (3 * torch.randn(2, 3, 5, 5)).double().softmax(-1)
    p = P.sort(-1, descending=True).values

    def g(k):
        following = p[..., k] if k < 5 else 0
        return p[..., k - 1] * (1 - p[..., k - 1] + following)

    torch.testing.assert_close(ls.nn.jasmin(P), g(1).log().amax(-1).mean())
    for k in (2, 4, 5):
        torch.testing.assert_close(ls.nn.jasmin(P, k), (g(1) / g(k)).log().amax(-1).mean())
    norms = torch.linalg.matrix_norm(torch.diag_embed(P) - P[..., None] * P[..., None, :], 2)
    assert ls.nn.jasmin(P) >= norms.log().amax(-1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jasmin_does_not_lose_what_is_left_beside_a_sharp_row(dtype):
    """1 - p_1 rounds to 0 where the other weights do not; one key or a sharp row gives no NaN."""
    scores = torch.tensor([[0.0, -30.0, -31.0]]).requires_grad_(True)
    value = ls.nn.jasmin(scores.softmax(-1))
    exact = ls.nn.jasmin(torch.tensor([[0.0, -30.0, -31.0]]).double().softmax(-1))
    assert value.item() == pytest.approx(exact.item(), rel=1e-5) and exact < -29
    value.backward()
    assert scores.grad.isfinite().all() and scores.grad.abs().max() > 0.1
    P = ls.nn.DotSelfAttention(8, 2, causal=True).to(dtype).weights(torch.randn(4, 8).to(dtype))
    for k in (0, 2, 4):
        assert ls.nn.jasmin(P, k).isfinite() and ls.nn.jasmin(torch.eye(4), k).isfinite()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ls.nn.jasmin(torch.eye(4), 1),
            "k must be 0, or an integer from 2 to the number of keys 4",
        ),
        (lambda: ls.nn.jasmin(torch.eye(4), 5), "k must be 0, or an integer"),
        (lambda: ls.nn.jasmin(torch.eye(4), 2.0), "got 2.0"),
        (lambda: ls.nn.jasmin(torch.eye(4), "2"), "got '2'"),
        (lambda: ls.nn.jasmin(torch.eye(4), None), "got None"),
        (lambda: ls.nn.jasmin(torch.eye(4), False), "got False"),
        (lambda: ls.nn.jasmin(torch.ones(3)), r"attention weights \[\.\.\., n, n\]"),
        (lambda: ls.nn.jasmin(torch.ones(0, 0)), r"got torch.float32 \(0, 0\)"),
        (lambda: ls.nn.jasmin(torch.ones(2, 2).long()), r"got torch.int64 \(2, 2\)"),
        (lambda: ls.nn.jasmin([[1.0]]), "got list"),
        (lambda: ls.nn.jasmin(None), "got NoneType"),
        (lambda: ls.nn.measured_sigma(torch.tanh, torch.ones(2, 2).bfloat16()), "convert f and X"),
        (lambda: ls.nn.measured_sigma(torch.tanh, torch.full((2, 2), math.nan)), "X holds nan"),
    ],
)
def test_errors_say_what_to_do(call, words):
    with unchecked(), pytest.raises(ls.UserError, match=words):
        call()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 1, 1), (4, 1)])
def test_a_single_key_has_the_gradient_zero(shape):
    P = torch.ones(shape, requires_grad=True)
    ls.nn.jasmin(P).backward()
    assert P.grad is not None and not P.grad.any()


def test_a_power_iteration_is_measured_one_step_on_and_does_not_move():
    """What the next pass in training will be; the iteration itself stays where it is."""
    torch.manual_seed(0)
    f, X = (
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16, bias=False)).double(),
        torch.randn(3, 16).double(),
    )
    iteration = f.parametrizations.weight[0]
    before = iteration._u.clone()
    found = ls.nn.measured_sigma(f, X, 1e-10)
    assert torch.equal(iteration._u, before)
    with torch.no_grad():
        following = torch.linalg.matrix_norm(f.weight, 2)
    assert not torch.equal(iteration._u, before)
    torch.testing.assert_close(found.detach(), following, rtol=1e-9, atol=0)
    assert ls.local_lipschitz(f.eval(), X).value == pytest.approx(
        ls.nn.measured_sigma(f, X, 1e-10).item(), rel=1e-6
    )
