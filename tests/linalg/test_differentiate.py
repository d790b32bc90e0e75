"""Jacobians of any map by autograd: against dense ones, and what cannot be differentiated."""

from functools import partial

import pytest
import torch

import lipscope as ls
from tests.checks import assert_matches_dense


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def module(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, dtype=torch.float64, **options
    ).eval()


def dense(f, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel())


MAPS = {
    "pointwise": torch.sin,
    "polynomial": lambda X: X @ X.mT @ X,
    "constant": lambda X: torch.ones_like(X),
    "linear": lambda X: X.cumsum(-2),
    "sdpa": lambda X: torch.nn.functional.scaled_dot_product_attention(X, X, X),
    "encoder layer": module(dropout=0.0),
}


@pytest.mark.parametrize("name", MAPS)
def test_any_map_against_the_dense_jacobian(name):
    f, X = MAPS[name], draw(5, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = dense(f, X)
    assert_matches_dense(ls.jacobian(f, X), exact)
    batch = torch.stack([X, draw(5, 8, seed=1), 2 * X])
    assert_matches_dense(
        ls.jacobian(f, batch), torch.stack([dense(lambda x: f(x[None])[0], x) for x in batch])
    )


def test_closed_form_and_autograd_agree():
    f = ls.SelfAttention(draw(4, 6), draw(4, 6, seed=1), draw(6, 6, seed=2), heads=2, causal=True)
    X = draw(5, 6, seed=3)
    assert_matches_dense(ls.jacobian(lambda Z: f(Z), X), ls.jacobian(f, X).to_dense())


def test_constant_map_has_norm_zero():
    e = ls.local_lipschitz(MAPS["constant"], draw(3, 4))
    assert e.value == e.upper == 0 and e.status is ls.Status.BREAKDOWN


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_dropout_in_training_mode_is_refused_by_name(rate):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(rate)).double()
    with pytest.raises(ls.UserError, match=f"module '1' applies dropout at rate {rate}"):
        ls.jacobian(model, draw(3, 4))
    ls.jacobian(model.eval(), draw(3, 4))


def test_hidden_randomness_is_found_out():
    with pytest.raises(ls.UserError, match="f is random"):
        ls.jacobian(lambda X: torch.nn.functional.dropout(X, 0.5), draw(10, 8))


@pytest.mark.parametrize(
    ("f", "X", "message"),
    [
        (
            torch.sin,
            draw(3, 4).index_fill(0, torch.tensor(1), torch.nan),
            r"X holds nan at index \[1, 0\]",
        ),
        (
            torch.sin,
            torch.ones(3, 4, dtype=torch.int32),
            "X must be a floating-point tensor, got torch.int32",
        ),
        (torch.sin, draw(2, 2, 2, 2), "X must have shape"),
        (torch.sin, draw(3, 0), "X is empty"),
        (torch.sin, draw(3, 4).to(torch.float8_e4m3fn), "too coarse to differentiate"),
        (lambda X: (X, X), draw(3, 4), "f must return a floating-point tensor, got tuple"),
        (
            lambda X: X.argmax(-1),
            draw(3, 4),
            "f must return a floating-point tensor, got torch.int64",
        ),
        (lambda X: X.sum(0), draw(2, 3, 4), "the leading dimension must stay 2"),
    ],
)
def test_bad_input_is_named(f, X, message):
    with pytest.raises(ls.UserError, match=message):
        ls.jacobian(f, X)


def test_the_callers_graph_and_weights_are_left_alone():
    model, X = module(dropout=0.0), draw(5, 8).requires_grad_()
    ls.local_lipschitz(model, X)
    assert X.grad is None and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("members", [2, 3, 5, 8])
def test_every_pair_of_members_that_mix_is_refused(members):
    loud = torch.tensor([1e6] + [1.0] * (members - 1), dtype=torch.float64)[:, None, None]
    X = draw(members, 2, 2)
    for i in range(members):
        for j in range(members):

            def f(Z, i=i, j=j):
                Y = (loud * Z).clone()
                Y[i] = Y[i] + Z[j]
                return Y

            if i == j:
                assert ls.local_lipschitz(f, X).value[i] == pytest.approx(1 + loud[i].item())
                continue
            with pytest.raises(ls.UserError, match="mixes the members of the batch"):
                ls.local_lipschitz(f, X)


def test_members_that_mix_in_a_single_entry_are_refused():
    def f(Z):
        Y = Z.clone()
        Y[0, 1, 1] = Y[0, 1, 1] + Z[1, 0, 0]
        return Y

    with pytest.raises(ls.UserError, match="mixes the members of the batch"):
        ls.local_lipschitz(f, draw(2, 2, 2))


def test_what_autograd_cannot_differentiate_twice_is_a_sentence():
    f = partial(torch.utils.checkpoint.checkpoint, torch.sin, use_reentrant=True)
    with pytest.raises(ls.UserError, match="cannot be differentiated twice by autograd"):
        ls.local_lipschitz(f, draw(3, 4))


class Detached(torch.autograd.Function):
    """x^2, whose backward pass forgets that it depends on x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g.detach()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("least", [0.0, 1e-12, 1.0])
def test_a_backward_pass_that_detaches_is_refused_whatever_the_sizes_of_the_input(size, least):
    X = size * draw(3, 4)
    X[1, 2] = size * least
    with pytest.raises(ls.UserError, match="backward pass that autograd cannot differentiate"):
        ls.local_lipschitz(Detached.apply, X)


def test_a_map_that_keeps_state_in_place_is_differentiated():
    class Keeps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, 4, dtype=torch.float64))

        def forward(self, X):
            self.seen.copy_(X.detach())
            return X * self.seen

    f, X = Keeps(), draw(3, 4)
    assert ls.local_lipschitz(f, X).value == pytest.approx(X.abs().max().item())
    assert torch.equal(f.seen, X)


class OfBatches(torch.nn.Module):
    """A module that reads the third dimension of its input, as many do."""

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        sizes = dict(enumerate(X.shape))
        return X * sizes[2]


def test_modules_that_take_only_batches_are_told_with_the_remedy():
    X = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ls.UserError, match=r"KeyError: 2\), but takes batches: pass X\[None\]"):
        ls.local_lipschitz(OfBatches(), X)
    assert ls.local_lipschitz(OfBatches(), X[None])[0].value == pytest.approx(3)

    def broken(X):
        raise ValueError("a mistake of the user")

    with pytest.raises(ValueError, match="a mistake of the user") as error:
        ls.local_lipschitz(broken, X)
    assert not isinstance(error.value, ls.UserError)


def test_modules_with_several_inputs_and_images_are_told_with_the_remedy():
    X, c = torch.randn(4, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def two(X, context):
        return X * context

    with pytest.raises(ls.UserError, match=r"needs more than one input .*lambda X: f\(X, context"):
        ls.local_lipschitz(two, X)
    assert ls.local_lipschitz(lambda X: two(X, 2 * c), X).value == pytest.approx(2)
    image = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    with pytest.raises(ls.UserError, match=r"as an image x, measure lambda X: f\(X.reshape"):
        ls.local_lipschitz(torch.sin, image)
    found = ls.local_lipschitz(lambda X: 3 * X.reshape(image.shape), image.reshape(1, -1))
    assert found.value == pytest.approx(3)
