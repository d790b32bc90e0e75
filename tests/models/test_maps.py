"""A part of a model under autograd: its derivative is that of its values, or it is refused."""

from dataclasses import dataclass

import pytest
import torch

from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
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
    assert bool((torch.as_tensor(J.condition) == 7.0).all())
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
        torch.as_tensor(jacobian(site.f, site.X).condition) for site in (heads, attention)
    )
    assert each.shape == (4,) and bool((together > 0.1).all())
    torch.testing.assert_close(each.view(2, 2).amax(dim=1), together)


class Counts(torch.nn.Module):
    """Takes as many tokens as it counts, in floating point, as some mixtures of experts do."""

    def forward(self, x):
        return x[:, : int(torch.ones_like(x[0, :, 0]).sum() + 0 * x.sum())] * x.shape[1]


def test_a_map_that_counts_in_floating_point_is_measured_or_refused_in_a_sentence():
    model = make("llama")
    model.layers[0].mlp.act_fn = Counts()
    site = load(model).sites([1, 2, 3], scopes=["block"], layers=[0])[0]
    J = site.f.linearize(site.X[0])
    with pytest.raises(UserError, match="it computes sizes in floating point"):
        for i in range(20):
            J.perturbed(i)
