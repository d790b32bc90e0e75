"""When two tensors of a model count as one, and when one is a sum of two others."""

import pytest
import torch

from lipscope.models.structure import _combines, _same


def drawn(seed: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(500, generator=g, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_sums_in_another_order_are_the_same_and_neighbours_are_not(dtype, size):
    x, e = size * drawn(0, dtype), size * drawn(1, dtype)
    eps = torch.finfo(dtype).eps
    assert _same(x, x) and _same(x + 8 * eps * e, x) and _same(x, x + 8 * eps * e)
    assert not _same(x + 1e-3 * e, x) and not _same(x, x[1:]) and not _same(-x, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_residual_is_a_sum_of_both_whatever_their_weights(dtype):
    x, a, other = (drawn(seed, dtype) for seed in range(3))
    for s, c in ((1.0, 1.0), (0.1, 1.0), (-2.0, 0.3)):
        assert _combines(s * x + c * a, x, a)
    assert not _combines(x, x, a) and not _combines(3 * a, x, a)
    assert not _combines(x + other, x, a) and not _combines(x + a + 0.01 * other, x, a)
    assert not _combines(2 * x, x, x) and not _combines((x + a)[1:], x, a)
