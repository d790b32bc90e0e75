"""Float64 means float64: hard casts inside a model do not cost digits."""

import pytest
import torch

from lipscope.models.loading import load
from lipscope.models.maps import Float64
from tests.models.zoo import make, sample

RMSNORM = ["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "t5"]


def slope_errors(f, X, step=1e-6):
    """Central differences along a random direction against the derivative, at one step."""
    generator = torch.Generator().manual_seed(0)
    E = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    product = torch.autograd.functional.jvp(f, X, E)[1]
    with torch.no_grad():
        difference = (f(X + step * E) - f(X - step * E)) / (2 * step)
    return float((difference - product).norm() / product.norm())


@pytest.mark.parametrize("name", RMSNORM)
def test_finite_differences_agree_with_the_derivative(name):
    (site,) = load(make(name)).sites(**sample(name, batch=1), scopes=["block"], layers=[1])
    assert slope_errors(site.f, site.X) < 1e-8


CASES = {
    "to": lambda x: x.to(torch.float32),
    "to by name": lambda x: x.to(dtype=torch.float16),
    "to device and dtype": lambda x: x.to("cpu", torch.bfloat16),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "type": lambda x: x.type(torch.float32),
    "softmax": lambda x: torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: x.sum(-1, dtype=torch.float32),
    "matmul": lambda x: x @ torch.ones(3, 3, dtype=torch.float32),
    "linear": lambda x: torch.nn.functional.linear(
        x.float(), torch.ones(2, 3, dtype=torch.float32)
    ),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, torch.ones(3, 3, dtype=torch.float32)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_float64_tensor_stays_float64(case):
    x = torch.rand(2, 3, dtype=torch.float64)
    with Float64():
        assert CASES[case](x).dtype == torch.float64


def test_integers_and_float32_are_left_alone():
    with Float64():
        assert torch.arange(3).float().dtype == torch.float32
        assert torch.ones(2).half().dtype == torch.float16
    with load(make("llama"), dtype="float32").survey(**sample("llama")).runner.ready():
        assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32


def test_measuring_in_float32_stays_in_float32():
    for site in load(make("llama"), dtype="float32").sites(
        **sample("llama"), scopes=["heads", "block"]
    ):
        assert site.X.dtype == site.value().dtype == torch.float32
