"""Inputs and options that once gave wrong numbers."""

from dataclasses import replace

import pytest
import torch

import lipscope as ls
from lipscope.attention import linearization
from tests.checks import dense_operator
from tests.naive import dense_jacobian


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(d: int = 4, **options) -> ls.SelfAttention:
    return ls.SelfAttention(draw(4, d), draw(4, d, seed=1), draw(3, d, seed=2), **options)


def truth(f: ls.SelfAttention, X: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()


@pytest.mark.parametrize("factor", [1e4, 1e8, 1e12, 1e100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_too_large_to_resolve_claim_nothing_false(factor, dtype):
    for seed in range(6):
        f, X = layer(12), draw(3, 12, seed=seed + 3)
        f = replace(f, Q=factor * f.Q, K=f.K)
        if dtype == torch.float32 and factor > 1e30:
            continue
        e = ls.local_lipschitz(f.to(dtype), X.to(dtype))
        exact = truth(f, X)
        assert not e.lower > exact * (1 + 1e-6) and not e.upper < exact * (1 - 1e-6), (
            f"{seed}: {exact} not in {e}"
        )


@pytest.mark.parametrize("size", [1.0, 1e8, 1e20, 1e70])
def test_a_mean_of_tokens_stays_among_them(size):
    """Regression: the weights of tied scores beyond 1/eps summed to n, as lse had lost log(sum)."""
    I, x = torch.eye(2, dtype=torch.float64), size * torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    X = torch.cat([x.expand(7, 2), -x])
    out = ls.SelfAttention(I, I, I)(X)
    if size > 1.0:  # scores of order one still mix the tokens
        assert torch.allclose(out[:7], X[:7], rtol=1e-12)
    assert (out.norm(dim=1) <= X.norm(dim=1).max() * (1 + 1e-12)).all()


@pytest.mark.parametrize("size", [1e6, 1e10, 1e200])
def test_what_stands_at_a_padded_token_has_no_influence(size):
    X, padding = draw(5, 4, seed=4), torch.arange(5) < 4
    exact = truth(layer(), X[:4])
    X[4] *= size
    e = ls.local_lipschitz(layer(padding=padding), X, gap=0.01)
    assert e.value == pytest.approx(exact, rel=1e-10) and e.lower <= exact <= e.upper


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_an_outlier_that_few_rows_see(size):
    for seed in range(5):
        X = draw(5, 4, seed=seed + 4)
        X[4] *= size
        f = replace(layer(causal=True), K=layer().Q)
        exact = truth(f, X)
        e = ls.local_lipschitz(f, X, gap=0.01)
        assert e.lower <= exact * (1 + 1e-9) and exact * (1 - 1e-9) <= e.upper


@pytest.mark.parametrize("size", [1e10, 1e13, 1e17])
def test_a_value_bias_never_matters(size):
    X = draw(5, 4, seed=4)
    exact = truth(layer(), X)
    e = ls.local_lipschitz(
        layer(biases=(None, None, torch.full((3,), size).double())), X, tol=1e-10, gap=1e-4
    )
    assert e.value == pytest.approx(exact, rel=1e-12) and e.lower <= exact <= e.upper


def test_weights_that_require_grad():
    X = draw(5, 4, seed=4)
    f = ls.SelfAttention(
        *(W.requires_grad_() for W in (draw(4, 4), draw(4, 4), draw(3, 4), draw(4, 3)))
    )
    assert ls.local_lipschitz(f, X).value == pytest.approx(truth(f.to(torch.float64), X), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    f, X = layer(12).to(dtype), draw(5, 12, seed=4).to(dtype)
    exact = ls.local_lipschitz(f, X, precision="exact").value
    assert ls.local_lipschitz(f, X, tol=0.05).value == pytest.approx(exact, rel=0.1)
    assert len(ls.local_lipschitz(f.heads_apart(), X, tol=0.05)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.ones(5, 5, dtype=torch.int64)}, "mask must be boolean"),
        (
            {"mask": torch.zeros(5, 5, dtype=torch.float32)},
            "mask is torch.float32 and Q is torch.float64",
        ),
        ({"window": 0}, "window must be at least 1"),
        ({"kernel": ls.Dot(softcap=-2.0)}, "softcap must be positive"),
        ({"kernel": ls.Dot(sinks=torch.zeros(3))}, r"sinks must have shape \[1\]"),
        ({"padding": torch.ones(5)}, "padding must be boolean"),
        ({"biases": (torch.zeros(4, dtype=torch.float32), None, None)}, "bq is torch.float32"),
    ],
)
def test_what_attend_refuses_the_layer_refuses(options, message):
    with pytest.raises(ls.UserError, match=message):
        layer(**options)


def test_maps_with_state_for_each_member():
    W = draw(8, 30, 30)
    W[:4] = torch.eye(30)
    e = ls.local_lipschitz(lambda x: x @ W, draw(8, 1, 30), tol=1e-8)
    assert torch.allclose(e.value, torch.linalg.matrix_norm(W, 2), rtol=1e-9)


def test_restarts_with_a_member_that_is_not_finite():
    M = draw(4, 40, 40)
    M[2] = torch.nan
    e = ls.spectral_norm(dense_operator(M), solver=ls.Solver(memory=1))
    assert e.status[2] is ls.Status.NON_FINITE
    for i in (0, 1, 3):
        assert e.value[i].item() == pytest.approx(
            torch.linalg.matrix_norm(M[i], 2).item(), rel=1e-9
        )


def test_a_norm_beyond_the_largest_number():
    e = ls.spectral_norm(dense_operator(1.5e308 * torch.ones(4, 1, dtype=torch.float64)))
    assert (
        e.status is ls.Status.OVERFLOW
        and e.value != e.value
        and e.lower == 0
        and e.upper == float("inf")
    )


@pytest.mark.wide
def test_later_triplets_have_true_lower_bounds():
    s = torch.tensor([1.0, 0.5, 0.3, 0.2, 0.1, 0.05] + [0.01] * 10, dtype=torch.float64)
    for seed in range(60):
        left, right = (torch.linalg.qr(draw(16, 16, seed=2 * seed + i))[0] for i in (0, 1))
        found = ls.singular_triplets(
            dense_operator(left @ torch.diag(s) @ right), 2, tol=0.3, solver=ls.Solver(seed=seed)
        )
        assert found[1].lower <= 0.5 + 1e-9


def test_hessians_through_vmap():
    t = draw(1, 3, 2)
    value = lambda z: (ls.attend(z, z, z) * t).sum()  # noqa: E731
    H = torch.func.hessian(value)(t)
    assert torch.allclose(H, torch.func.jacrev(torch.func.jacrev(value))(t), atol=1e-12)


@pytest.mark.parametrize("cache", [0, None])
def test_scores_of_1e12_against_the_selection_they_make(cache, monkeypatch):
    """Every query then reads one token: J selects rows and applies values, in closed form."""
    if cache is not None:
        monkeypatch.setattr(linearization, "CACHE", cache)  # tiles
    n, d, heads = 65, 8, 2
    Q, K, V, O = (draw(d, d, seed=i).float() for i in range(4))
    f = ls.SelfAttention(1e12 * Q, K, V, O, heads=heads, causal=True)
    X = draw(n, d, seed=4).float()
    q, k = (
        (X.double() @ W.double().T).unflatten(1, (heads, -1)).transpose(0, 1) for W in (f.Q, f.K)
    )
    scores = (q @ k.mT).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    best = scores.topk(2).values[:, 1:]
    assert (best[..., 0] - best[..., 1]).min() > 1e-4 * best.abs().max()  # no ties in float32
    chosen = torch.nn.functional.one_hot(scores.argmax(-1), n).double()
    values = O.double().unflatten(1, (heads, -1)).transpose(0, 1) @ V.double().unflatten(
        0, (heads, -1)
    )
    J = sum(torch.kron(chosen[h], values[h]) for h in range(heads))
    sigma = torch.linalg.matrix_norm(J, 2).item()
    for seed in range(5):
        e = ls.local_lipschitz(f, X, tol=1e-3, solver=ls.Solver(seed=seed))
        assert e.lower <= sigma * (1 + 1e-9)
        assert e.value == pytest.approx(sigma, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (3, 2, 5, 0)])
def test_an_empty_batch_and_empty_values(shape, device):
    """Regression: kernels cannot describe a tensor without entries, as the last batch may be."""
    q, k = (torch.randn(*shape[:-1], 4, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(shape, device=device, dtype=torch.bfloat16)
    point = tuple(x.requires_grad_() for x in (q, k, v))
    out, tangent = torch.func.jvp(ls.attend, point, tuple(x.detach() for x in point))
    assert out.shape == tangent.shape == v.shape
    assert [x.shape for x in torch.autograd.grad(tangent.sum(), point)] == [x.shape for x in point]
