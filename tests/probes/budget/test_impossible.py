"""Predictions that cannot be right: an error that names the site, never an explanation."""

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope._types import UserError
from lipscope.probes.budget.formats import read_format, read_formats
from tests.probes.budget.tiny import some_ids, tiny


class Cancelling(nn.Module):
    """Digits are lost in the difference of two large numbers, in the layer that is asked for."""

    def __init__(self, large):
        super().__init__()
        torch.manual_seed(0)
        self.large = large
        self.embed = nn.Embedding(60, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = (x * self.large).cos() if self.large == torch.inf else x + self.large
                x = x - self.large if self.large < torch.inf else x
        return x


def test_a_prediction_beyond_the_output_names_its_site():
    with pytest.raises(UserError, match=r"predicted error in bf16 is .*comes from other add"):
        ls.error_budget(Cancelling(1e4), some_ids(), formats="bf16")
    budget = ls.error_budget(Cancelling(1e4), some_ids(), formats="int8")
    assert budget.total("int8").value < 0.1


def test_a_prediction_that_is_not_a_number_names_its_site():
    model = tiny("llama_lm")
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = torch.inf
    for format, metric in (("int8", "kl"), ("int4:8", "output")):
        with pytest.raises(UserError, match=rf"in {format} is (nan|inf).*|non-finite"):
            ls.error_budget(model, some_ids(), formats=format, metric=metric)


def test_coarse_formats_may_destroy_the_output():
    budget = ls.error_budget(tiny("gpt2"), some_ids(), formats={"twice": lambda w: 12 * w})
    assert budget.total("twice").value > 1


def test_a_comparison_never_explains_by_an_impossible_prediction():
    # A norm that divides by almost nothing: the budget is far above the state.
    right, port = tiny("llama"), tiny("llama")
    for model in (right, port):
        embedding = model.embed_tokens.weight.data
        embedding[:] = 1.0 + 1e-6 * embedding
        model.layers[0].input_layernorm.weight.data *= 1e4
        weight = model.layers[0].self_attn.v_proj.weight.data
        weight -= weight.mean(dim=1, keepdim=True)
    port.layers[2].mlp.down_proj.weight.data.neg_()
    with pytest.raises(UserError, match="which rounding cannot explain; most of it comes from"):
        ls.check_run(right, port.bfloat16(), some_ids())


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "int8", "int3", "kv8", "kv4", "w4a8", "w8a4", "w3a3"]
)
def test_the_step_of_a_format_is_its_largest_error(name):
    f = read_format(name)
    x = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    if f.dtype is not None:
        error = ((x.to(f.dtype).double() - x) / x.abs().clamp_min(1e-3)).abs().max()
    else:
        used = [q for q in (f.weight, f.activation, f.cache) if q]
        # An affine format has all its numbers between the smallest and the largest entry.
        error = max((q(x) - x).abs().max() for q in used) / (2 if f.cache else 1)
    assert 0.9 * f.step <= error <= f.step * (1 + 1e-9)


def test_the_step_of_a_function_is_not_known():
    (own,) = read_formats({"own": lambda w: 3 * w})
    assert own.step == torch.inf
