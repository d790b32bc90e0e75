"""attend: value and derivatives to second order, under autograd and torch.func, tile by tile."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import lipscope as ls
from lipscope.fused import backend, tiled
from lipscope.fused.primitive import Rules, make_pattern
from tests.naive import naive_attend

N, HEADS, SIZE, VALUES = 5, 4, 3, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def boolean(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.5


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 2},
    "window both ways": {"window": 3},
    "scaled": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "boolean mask": {"mask": boolean(N, N)},
    "mask per member": {"mask": boolean(2, 1, N, N)},
    "mask per head": {"mask": boolean(2, HEADS, N, N)},
    "additive mask": {"mask": draw(N, N)},
    "additive with -inf": {"mask": torch.where(boolean(N, N), draw(N, N), -torch.inf)},
    "all masked": {"mask": torch.zeros(N, N, dtype=torch.bool)},
    "padding": {"padding": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)},
    "sinks": {"sinks": draw(HEADS)},
    "everything": {
        "causal": True,
        "window": 4,
        "softcap": 2.0,
        "sinks": draw(HEADS),
        "mask": boolean(N, N, seed=3),
        "padding": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool),
    },
}
MEMBERWISE = ("padding", "mask per member", "mask per head", "everything")


def tensors(groups: int, keys: int = N, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(2, HEADS, N, SIZE, seed=seed),
        draw(2, groups, keys, SIZE, seed=seed + 1),
        draw(2, groups, keys, VALUES, seed=seed + 2),
    )


@pytest.fixture(params=[1 << 20, 24], ids=["one tile", "many tiles"])
def tile(request, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", request.param)
    return request.param


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_value_and_mixed_second_derivatives(name, groups, tile):
    """Value, first and second derivatives in both modes, against autograd through the softmax."""
    x, d, e = tensors(groups), tensors(groups, seed=10), tensors(groups, seed=20)
    g = draw(2, HEADS, N, VALUES, seed=30)

    def results(f):
        first = jvp(f, x, d)
        pulled = vjp(f, *x)[1](g)
        forward_forward = jvp(lambda *z: jvp(f, z, d)[1], x, e)[1]
        reverse_forward = grad(lambda *z: (jvp(f, z, d)[1] * g).sum(), argnums=(0, 1, 2))(*x)
        forward_reverse = jvp(lambda *z: vjp(f, *z)[1](g), x, e)[1]
        return [*first, *pulled, forward_forward, *reverse_forward, *forward_reverse]

    ours = results(lambda q, k, v: ls.attend(q, k, v, **OPTIONS[name]))
    plain = results(lambda q, k, v: naive_attend(q, k, v, **OPTIONS[name]))
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks", "all masked", "everything"])
def test_gradcheck_and_gradgradcheck(name):
    x = tuple(t.requires_grad_() for t in tensors(2))
    f = lambda q, k, v: ls.attend(q, k, v, **OPTIONS[name])  # noqa: E731
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, x, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in MEMBERWISE])
def test_vmap_composes(name):
    """vmap of jacrev of vmap, as torch.func users write it."""
    q, k, v = tensors(2)

    def nested(f):
        inner = lambda a: vmap(lambda one: f(one, k[0], v[0]))(a)  # noqa: E731
        return vmap(jacrev(inner))(torch.stack([q, q + 1]))

    ours = nested(lambda *z: ls.attend(*z, **OPTIONS[name]))
    assert torch.allclose(ours, nested(lambda *z: naive_attend(*z, **OPTIONS[name])), atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_more_keys_than_queries(causal, tile):
    """A suffix of queries sees the keys before it: the last rows of the square problem."""
    q, k, v = tensors(2, keys=N)
    whole = ls.attend(q, k, v, causal=causal)
    part = ls.attend(q[:, :, 3:], k, v, causal=causal)
    assert torch.allclose(part, whole[:, :, 3:])


def test_third_derivatives_are_refused_not_wrong():
    q, k, v = (t.requires_grad_() for t in tensors(2))
    (g1,) = torch.autograd.grad(ls.attend(q, k, v).square().sum(), q, create_graph=True)
    (g2,) = torch.autograd.grad(g1.square().sum(), q, create_graph=True)
    with pytest.raises(ls.UserError, match="third derivative"):
        g2.sum().backward()


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
@pytest.mark.parametrize("middle", [jacfwd, jacrev])
@pytest.mark.parametrize("inner", [jacfwd, jacrev])
def test_third_derivatives_are_refused_in_every_nesting(outer, middle, inner):
    q, k, v = draw(1, 2, 2), draw(1, 3, 2), draw(1, 3, 1)
    with pytest.raises(ls.UserError, match="third derivative"):
        outer(middle(inner(lambda x: ls.attend(x, k, v))))(q)


def test_a_product_J_v_by_two_backward_passes_is_itself_differentiable():
    q, k, v = (t.requires_grad_() for t in tensors(2))
    found = []
    for attend in (ls.attend, naive_attend):
        o = attend(q, k, v)
        g, u, d = torch.zeros_like(o, requires_grad=True), torch.ones_like(o), torch.ones_like(q)
        (back,) = torch.autograd.grad(o, q, g, create_graph=True)
        (Jd,) = torch.autograd.grad(back, g, d, create_graph=True)
        found.append(torch.autograd.grad((u * Jd).sum(), (q, k, v)))
    for mine, naive in zip(*found, strict=True):
        assert torch.allclose(mine, naive, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": draw(2, 4, N, 7)}, "q, k, v do not fit"),
        ({"k": draw(2, 3, N, SIZE), "v": draw(2, 3, N, VALUES)}, "4 query heads cannot share 3"),
        ({"q": draw(N, SIZE)}, r"q must be a floating-point tensor \[..., heads, tokens, size\]"),
        ({"q": torch.zeros(2, 4, N, SIZE, dtype=torch.int64)}, "q must be a floating-point tensor"),
        ({"v": draw(2, 4, 0, VALUES), "k": draw(2, 4, 0, SIZE)}, "k is empty"),
        ({"mask": torch.zeros(N, N, dtype=torch.int64)}, "mask must be boolean"),
        ({"mask": boolean(N, N + 1)}, "mask must broadcast"),
        ({"padding": boolean(2, N + 1)}, "padding must be boolean"),
        ({"sinks": draw(3)}, r"sinks must be a detached tensor of shape \[4\]"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_bad_input(change, message):
    arguments = dict(zip("qkv", tensors(4), strict=True)) | change
    with pytest.raises(ls.UserError, match=message):
        ls.attend(**arguments)


def test_a_product_with_the_jacobian_takes_no_second_derivative(monkeypatch):
    """Autograd asks for all derivatives; those that nobody reads are not computed."""
    calls, second = [], backend.second_vjp
    monkeypatch.setattr(backend, "second_vjp", lambda *args: calls.append(1) or second(*args))
    W = draw(3, 4, 4)

    def f(x: Tensor) -> Tensor:
        return ls.attend(*((x @ w)[None] for w in W), causal=True)[0]

    X = W[0].clone()
    J = ls.jacobian(f, X)
    assert (
        torch.allclose(J.to_dense(), torch.autograd.functional.jacobian(f, X).reshape(16, 16))
        and not calls
    )
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x)
    assert calls and h.norm() > 0


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_one_row_says_which_keys_are_real(padded):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64)
    row = torch.rand(2, 1, 1, 6) < 0.6
    padding = torch.rand(2, 6) < 0.8 if padded else None
    rules = Rules(causal=True, window=None, softcap=None, shift=0)
    pattern = make_pattern(row, padding, None, rules)
    assert pattern.mask is None and pattern.keys is not None
    moved = tuple(torch.randn_like(x) for x in (q, k, v))

    def with_mask(mask):
        def f(q, k, v):
            return ls.attend(q, k, v, causal=True, mask=mask, padding=padding)

        return f

    pairs = [
        torch.func.jvp(with_mask(mask), (q, k, v), moved) for mask in (row, row.expand(2, 1, 6, 6))
    ]
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y)
