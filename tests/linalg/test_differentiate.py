"""Jacobians of any map by autograd: against dense ones, and what cannot be differentiated."""

from functools import partial

import pytest
import torch

import lipscope as ls
from lipscope.linalg.differentiate import TwiceDifferentiable
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


def in_a_single_entry(Z: torch.Tensor) -> torch.Tensor:
    Y = Z.clone()
    Y[0, 1, 1] = Y[0, 1, 1] + Z[1, 0, 0]
    return Y


@pytest.mark.parametrize(
    ("f", "X", "remedy"),
    [
        (in_a_single_entry, draw(2, 2, 2), "pass one sequence"),
        (torch.nn.TransformerEncoderLayer(8, 2, 16).double(), draw(6, 3, 8), "batch_first=True"),
        (torch.nn.BatchNorm1d(4).double(), draw(6, 4, 3), "BatchNorm"),
    ],
)
def test_members_that_mix_are_refused_with_the_remedy(f, X, remedy):
    f = f.eval() if remedy == "batch_first=True" else f
    with pytest.raises(ls.UserError, match=f"mixes the members of the batch.*{remedy}"):
        ls.local_lipschitz(f, X)


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


def attention(tied: bool, power: int, d: int, seed: int, mode: str, dtype: torch.dtype):
    """L2 attention by torch.cdist, and the same in float64 with written-out distances."""
    g = torch.Generator().manual_seed(seed)
    Q, K, V = (torch.randn(d, d, generator=g, dtype=torch.float64).to(dtype) / 2 for _ in range(3))
    K = Q if tied else K

    def by_cdist(X):
        scores = torch.cdist(X @ Q, X @ K, compute_mode=mode) ** power
        return torch.softmax(-scores, dim=-1) @ (X @ V)

    def written_out(X):
        q, k = X @ Q.double(), X @ K.double()
        squares = (q[..., :, None, :] - k[..., None, :, :]).square().sum(dim=-1)
        zero = squares == 0  # along the diagonal of tied weights, whatever X is
        roots = torch.where(zero, 1.0, squares).sqrt()
        scores = torch.where(zero, 0.0, roots**power)
        return torch.softmax(-scores, dim=-1) @ (X @ V.double())

    return by_cdist, written_out


MODES = ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("power", [2, 1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n", [5, 30])
def test_attention_by_cdist_is_measured(n, tied, power, mode, dtype):
    for seed in range(2):
        f, exact = attention(tied, power, 3, seed, mode, dtype)
        X = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed + 50)).to(dtype)
        J = torch.autograd.functional.jacobian(exact, X.double()).reshape(n * 3, n * 3)
        sigma = torch.linalg.matrix_norm(J, 2).item()
        e = ls.local_lipschitz(f, X)
        assert e.status != ls.Status.NON_FINITE
        assert e.lower <= sigma <= e.upper
        assert e.value == pytest.approx(sigma, rel=1e-6 if dtype == torch.float64 else 1e-2)
    rows = ls.local_lipschitz(f, X, norm="inf")
    assert rows.value == pytest.approx(J.abs().sum(dim=1).max().item(), rel=1e-2)


def test_batches_and_second_derivatives_of_cdist():
    f, exact = attention(True, 2, 3, 0, MODES[0], torch.float64)
    X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    for e, x in zip(ls.local_lipschitz(f, X), X, strict=True):
        J = torch.autograd.functional.jacobian(exact, x).reshape(12, 12)
        assert e.value == pytest.approx(torch.linalg.matrix_norm(J, 2).item(), rel=1e-9)
    with TwiceDifferentiable():
        assert torch.autograd.gradgradcheck(f, X[0].clone().requires_grad_(True))
        apart = torch.randn(2, 5, 3).double()
        assert torch.autograd.gradcheck(
            torch.cdist, (X[0][None].requires_grad_(True), apart.requires_grad_(True))
        )


def test_roots_at_zero_are_named_with_the_remedy():
    X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()

    def by_root(X):
        d = (X[:, None] - X[None]).square().sum(dim=-1).sqrt()
        return torch.softmax(-(d**2), dim=-1) @ X

    for norm in ("2", "inf"):
        e = ls.local_lipschitz(by_root, X, norm=norm)
        assert e.status == ls.Status.NON_FINITE
        assert "the derivative of sqrt is not finite" in e.note and "squared distances" in repr(e)
    assert "f(X) itself is not finite" in ls.local_lipschitz(lambda X: X * torch.nan, X).note


@pytest.mark.parametrize(
    "f",
    [lambda X: torch.cdist(X, X, p=1), lambda X: torch.nn.functional.pdist(X)[:, None]],
)
def test_distances_that_cannot_be_differentiated_twice_are_refused_by_name(f):
    with pytest.raises(ls.UserError, match=r"differentiated twice.*_[cp]dist_backward"):
        ls.jacobian(f, torch.randn(4, 3))
