"""Worst cases are upper bounds: against dense singular values and against all signs of errors."""

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.probes.budget.formats import symmetric
from tests.probes.budget.tiny import tiny


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(60, 6)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return self.b(torch.tanh(self.a(self.embed(ids))))


def test_the_worst_case_is_at_least_the_dense_one_and_close_to_it():
    model, ids = Two().double(), torch.arange(5)[None]
    budget = ls.error_budget(Two(), ids, formats="int8,int3", probes=2, worst=True)
    with torch.no_grad():
        h = torch.tanh(model.a(model.embed(ids)))
        y = model.b(h)
    for name, bits in (("int8", 8), ("int3", 3)):
        total = 0.0
        for part in (model.a, model.b):
            W = part.weight.detach()
            e = symmetric(W, bits=bits) - W

            def f(weight, part=part):
                key = "a.weight" if part is model.a else "b.weight"
                return torch.func.functional_call(model, {key: weight}, (ids,))

            J = torch.func.jacrev(f)(W).reshape(y.numel(), -1)
            total += float(torch.linalg.matrix_norm(J, 2) * e.norm() / y.norm())
        # Without layers, a site is the weight itself.
        assert total <= budget.worst[name] <= 1.1 * total


@pytest.mark.wide
def test_no_choice_of_signs_exceeds_the_worst_case():
    ids = torch.arange(8)[None]
    budget = ls.error_budget(tiny("gpt2"), ids, formats="int8,kv4", probes=4, worst=True)
    for name in budget.formats:
        apart = sum(row.predicted for row in budget.rows if row.format == name)
        assert apart < budget.worst[name]


def test_a_coarse_reference_has_no_worst_case():
    model = ls.load(tiny("gpt2"), dtype="float32")
    with pytest.raises(ls.UserError, match="worst case needs upper bounds of sigma"):
        ls.error_budget(model, torch.arange(8), formats="int8", probes=2, worst=True)
