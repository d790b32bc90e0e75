"""What the kernels are handed of a mask, whatever its strides; what they make of it is in
test_triton.
"""

import pytest
import torch

pytest.importorskip("triton")

from lipscope.fused.pattern import Pattern
from lipscope.fused.triton_masks import BYTES, bytes_of

N = 64
SHAPE = torch.Size((3, 2, N, 16))


def masks() -> dict[str, torch.Tensor]:
    m = torch.rand(3, 2, N, N, generator=torch.Generator().manual_seed(0)) < 0.5
    odd = torch.zeros(N, N + 1, dtype=torch.bool)
    odd[:, 1:] = m[0, 0]
    return {
        "one for each head": m,
        "one for all": m[0, 0],
        "expanded over the batch": m[:1].expand(3, 2, N, N),
        "expanded over heads": m[:, :1].expand(3, 2, N, N),
        "expanded over both": m[:1, :1].expand(3, 2, N, N),
        "sizes of one first in memory": m[0, 0].reshape(N, N, 1, 1).permute(2, 3, 0, 1),
        "columns first in memory": m.mT.contiguous().mT,
        "rows that are not aligned": odd[:, 1:],
    }


@pytest.mark.parametrize("name", masks())
def test_bytes_are_those_of_the_mask(name):
    mask = masks()[name]
    found = bytes_of(Pattern(mask=mask), SHAPE, N, 64, 64)
    assert found is not None and found.kind == BYTES
    tiles = found.mask_tiles
    assert all(4 * s % 16 == 0 for s in tiles.strides[:3]) and tiles.base.data_ptr() % 16 == 0
    entries = tiles.base.view(torch.bool)
    assert entries.shape[:2] == (found.mask.last_batch + 1, found.mask.last_head + 1)
    assert torch.equal(entries.expand(3, 2, N, N), mask.expand(3, 2, N, N))


@pytest.mark.parametrize("name", [name for name in masks() if "expanded" in name])
def test_expanded_masks_are_not_copied(name):
    mask = masks()[name]
    assert bytes_of(Pattern(mask=mask), SHAPE, N, 64, 64).mask_tiles.base.data_ptr() == (
        mask.data_ptr()
    )


OTHERS = {
    "additive": torch.zeros(N, N),
    "one row": torch.ones(1, N, dtype=torch.bool),
    "six keys": torch.ones(N, 6, dtype=torch.bool),
    "expanded over queries": torch.ones(3, 1, 1, N, dtype=torch.bool).expand(3, 1, N, N),
    "expanded over keys": torch.ones(N, 1, dtype=torch.bool).expand(N, N),
}


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_other_masks_are_surveyed(mask):
    assert bytes_of(Pattern(mask=mask), SHAPE, mask.shape[-1], 64, 64) is None
