"""Which states a run has, and how much larger than the average the error of a part may be."""

import pytest
import torch

from lipscope.probes.budget.comparing import _peak, state_budgets
from lipscope.probes.budget.subject import read_subject
from tests.probes.budget.tiny import some_ids, tiny


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_the_peak_of_an_error_is_its_largest_row_or_column_over_the_mean(size):
    error = torch.full((4, 6), size, dtype=torch.float64)
    assert _peak(error) == pytest.approx(1.0)
    one = torch.zeros(4, 6, dtype=torch.float64)
    one[2] = size  # one of four rows has all of it
    assert _peak(one) == pytest.approx(2.0) == _peak(one.T)
    one[:, :] = 0
    one[1, 5] = size  # one entry: its column is one of six
    assert _peak(one) == pytest.approx(6**0.5)


def test_without_an_error_nothing_stands_out():
    assert _peak(torch.zeros(4, 6, dtype=torch.float64)) == 1.0


@pytest.mark.parametrize(("kind", "norm"), [("llama", "norm"), ("gpt2", "ln_f"), ("bert", None)])
def test_the_state_before_a_final_norm_is_one_more_state(kind, norm):
    subject = read_subject(tiny(kind), some_ids(2, 8), head=False, length=8, samples=2)
    low = subject.in_dtype(torch.bfloat16)
    usual, states = state_budgets(subject, low, 2, 0)
    budgets, more = state_budgets(subject, low, 2, 0, before_norm=True)
    assert len(budgets) == len(more[0]) == len(more[1]) == len(usual) + (norm is not None)
    if norm is not None:
        module = tiny(kind).to(more[0][-1].dtype)
        for before, found in zip(more, states, strict=True):
            torch.testing.assert_close(getattr(module, norm)(before[-1]), found[-1])
