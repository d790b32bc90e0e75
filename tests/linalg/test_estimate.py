"""What an Estimate says of itself, and the types of its numbers."""

import pytest
import torch
from torch import Tensor

import lipscope as ls

G = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(3, 3, generator=G) for _ in range(3)]
X = torch.randn(4, 3, generator=G)
UNIFORM = torch.full((4,), 0.25)
CALLS = {
    "tokens": lambda f, X: ls.local_lipschitz(f, X),
    "largest coordinate": lambda f, X: ls.local_lipschitz(f, X, norm="inf"),
    "a map": lambda f, X: ls.local_lipschitz(lambda X: X @ X.T @ X, X),
    "operator": lambda f, X: ls.spectral_norm(ls.jacobian(f, X)),
    "triplet": lambda f, X: ls.singular_triplets(ls.jacobian(f, X), 2)[1],
    "member": lambda f, X: ls.local_lipschitz(f, X[None])[0],
    "measure": lambda f, X: ls.local_lipschitz(
        f, ls.mean_field.DiscreteMeasure(X, UNIFORM.to(X.dtype))
    ),
    "splitting": lambda f, X: ls.local_lipschitz(f, X, splitting=True),
    "failed": lambda f, X: ls.local_lipschitz(lambda X: X * torch.nan, X),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_an_estimate_are_python_numbers(name, dtype):
    e = CALLS[name](ls.SelfAttention(*(w.to(dtype) for w in WEIGHTS)), X.to(dtype))
    assert isinstance(e, ls.Estimate)
    for field in ("value", "lower", "upper", "residual", "confidence"):
        assert type(getattr(e, field)) is float
    assert type(e.steps) is int
    assert name == "failed" or round(e.value, 3) == pytest.approx(e.value, abs=1e-3)


def test_the_shape_of_the_input_decides_the_class():
    f = ls.SelfAttention(*WEIGHTS)
    e = ls.local_lipschitz(f, X[None])
    assert isinstance(e, ls.BatchEstimate) and isinstance(e.value, Tensor) and e.value.shape == (1,)
    assert e[0].value == pytest.approx(ls.local_lipschitz(f, X).value, rel=1e-5)


def test_an_estimate_without_an_upper_bound_says_why_and_what_to_do():
    f = ls.SelfAttention(*WEIGHTS)
    reason = "no upper bound: it needs float64 products; use precision='exact' or float64 inputs"
    e = ls.local_lipschitz(f, X)
    assert f"at least {e.lower:.10g}" in repr(e) and repr(e).endswith(f"; {reason})")
    assert "inf" not in repr(e) and "confidence" not in repr(e)
    assert reason in ls.local_lipschitz(f, X[None])._repr_html_().replace("&#x27;", "'")
    assert reason in repr(ls.local_lipschitz(f, X[None]))
    exact = ls.local_lipschitz(f, X, precision="exact")
    assert "no upper bound" not in repr(exact) and "at confidence 0.999999999" in repr(exact)
    given = ls.spectral_norm(ls.jacobian(f.double(), X.double()), start=X.double())
    assert "the start vector was given" in repr(given)


def test_a_batch_says_how_many_members_have_no_bound():
    M = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan)]).double()
    J = ls.LinearOperator(
        lambda x: (M @ x[..., None])[..., 0],
        lambda u: (M.mT @ u[..., None])[..., 0],
        in_shape=(3,),
        out_shape=(3,),
        batch=2,
    )
    e = ls.spectral_norm(J)
    assert "1 of 2 members: no bounds: the derivative is not finite" in repr(e)
    assert "at confidence 0.999999999; 1 of 2 members" in e._repr_html_()
