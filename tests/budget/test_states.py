"""How much larger than the average the error of a row or a column of states may be."""

import pytest
import torch

from lipscope.budget.states import _peak


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
