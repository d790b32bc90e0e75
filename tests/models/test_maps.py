"""A part of a model under autograd: its derivative is that of its values, or it is refused."""

from dataclasses import dataclass, replace

import pytest
import torch

from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.rounding_noise import UnseenRoundingError
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models import maps
from lipscope.models.capture import leaves
from lipscope.models.loading import load
from lipscope.models.maps import linearize
from tests.models.zoo import make, sample


@dataclass(frozen=True)
class Cube:
    """x^3, with `hidden` factors of it hidden from autograd."""

    hidden: int

    def value(self, x):
        return x.detach() ** self.hidden * x ** (3 - self.hidden)

    def largest_score(self, x):
        return torch.full(x.shape[:1], 7.0, dtype=torch.float64)

    def of_members(self, members):
        return self


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2)])
def test_a_map_hidden_from_autograd_is_refused(shape):
    X = 1 + torch.rand(shape, dtype=torch.float64)
    J = linearize(Cube(0), X)
    E = torch.rand_like(X)
    torch.testing.assert_close(J.mv(E), 3 * X.square() * E)
    assert bool((torch.as_tensor(J.rounding.condition) == 7.0).all())
    for hidden in (1, 2, 3):
        with pytest.raises(UserError, match="hidden from autograd"):
            linearize(Cube(hidden), X)


def test_a_model_that_cuts_its_own_gradient_is_refused():
    module = make("llama")
    module.get_submodule("layers.1.mlp").register_forward_hook(lambda m, args, out: out.detach())
    first, second = load(module).sites(**sample("llama"), scopes=["block"])
    jacobian(first.f, first.X)
    with pytest.raises(UserError, match="hidden from autograd"):
        jacobian(second.f, second.X)


def test_the_size_of_the_scores_is_passed_on_as_rounding_amplification():
    heads, attention = load(make("qwen3")).sites(**sample("qwen3"), layers=[0])
    each, together = (
        torch.as_tensor(jacobian(site.f, site.X).rounding.condition) for site in (heads, attention)
    )
    assert each.shape == (4,) and bool((together > 0.1).all())
    torch.testing.assert_close(each.view(2, 2).amax(dim=1), together)


class Counts(torch.nn.Module):
    """Takes as many tokens as it counts, in floating point, as some mixtures of experts do."""

    def forward(self, x):
        return x[:, : int(torch.ones_like(x[0, :, 0]).sum() + 0 * x.sum())] * x.shape[1]


def test_a_map_that_counts_in_floating_point_has_no_bounds():
    model = make("llama")
    model.layers[0].mlp.act_fn = Counts()
    site = load(model).sites([1, 2, 3], scopes=["block"], layers=[0])[0]
    # Whether a repetition counts too few depends on its directions: look at many.
    J = site.f.jacobian(site.X[0])
    with pytest.raises(UnseenRoundingError, match="it fails when its numbers move"):
        for i in range(20):
            J.rounding.perturbed(i)


def blocks(dtype: str):
    (site,) = load(make("llama"), dtype=dtype).sites(
        **sample("llama"), scopes=["block"], layers=[1]
    )
    return jacobian(site.f, site.X)


@pytest.mark.wide
def test_vectors_of_a_block_are_searched_for_roughly_and_its_products_stay_exact(monkeypatch):
    assert blocks("float32").low_precision is None  # too short
    monkeypatch.setattr(maps, "_takes_long", lambda X: True)
    J, truth = blocks("float32"), blocks("float64")
    assert J.low_precision is not None
    E = torch.randn(2, *J.in_shape)
    for name in ("mv", "rmv"):
        expected = getattr(truth, name)(E.double())
        exact, rough = (getattr(j, name)(E).double() - expected for j in (J, J.low_precision))
        assert exact.norm() < 1e-5 * expected.norm()
        assert 1e-4 * expected.norm() < rough.norm() < 0.1 * expected.norm()
    found, alone = (
        spectral_norm(j, 1e-4, solver=Solver(seed=0)) for j in (J, replace(J, low_precision=None))
    )
    torch.testing.assert_close(found.value, alone.value, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("score", [65.0, float("nan")])
def test_scores_too_large_for_bfloat16_are_not_searched_with_it(score, monkeypatch):
    monkeypatch.setattr(maps, "_takes_long", lambda X: True)
    monkeypatch.setattr(maps.Rerun, "largest_score", lambda f, x: torch.tensor([1.0, score]))
    assert blocks("float32").low_precision is None


def test_a_map_without_attention_is_not_searched_roughly(monkeypatch):
    monkeypatch.setattr(maps, "_takes_long", lambda X: True)
    assert linearize(Cube(0), torch.rand(2, 3, 2)).low_precision is None


def test_few_digits_are_for_long_inputs_on_a_gpu_only():
    assert not maps._takes_long(torch.zeros(1, maps.LONG, 2))
    assert not maps._takes_long(torch.zeros(1, 2, 2))


def test_tokens_that_enter_chosen_modules_are_leaves_of_the_graph():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    for module in (first, second):
        module.requires_grad_(False)
    with torch.no_grad(), leaves([second]):
        between = first(torch.ones(2, 3))
        result = second(between)
        of_numbers = second(torch.ones(2, 3))
    assert not between.requires_grad and result.requires_grad and of_numbers.requires_grad
    assert not second(between).requires_grad  # afterwards all is as before
