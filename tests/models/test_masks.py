"""Plain masks are recognised as what they are, and never written down on the way to attention."""

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sdpa_mask

from lipscope.attention.pattern import Pattern
from lipscope.linalg.differentiate import jacobian
from lipscope.models import masks
from lipscope.models.loading import load
from lipscope.models.masks import PlainMask, lipscope_mask
from tests.models.zoo import make, sample

WINDOW = masking_utils.sliding_window_causal_mask_function
BOTH_WAYS = masking_utils.bidirectional_mask_function


def arguments(rule, n: int, batch: int = 2, **more) -> dict:
    return {"batch_size": batch, "q_length": n, "kv_length": n, "mask_function": rule, **more}


@pytest.fixture(params=[1, 50, 1 << 26])
def rows(request, monkeypatch):
    monkeypatch.setattr(masks, "ROWS", request.param)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        (causal_mask_function, None, Pattern(causal=True)),
        (WINDOW(3), 3, Pattern(causal=True, window=3)),
        (WINDOW(30), 30, Pattern(causal=True)),
        (BOTH_WAYS, None, Pattern()),
    ],
)
def test_plain_masks_are_told(rule, size, expected):
    mask = lipscope_mask(**arguments(rule, 11, local_size=size))
    assert isinstance(mask, PlainMask) and mask.shape == (2, 1, 11, 11) and mask.dtype == torch.bool
    assert (mask.pattern.causal, mask.pattern.window) == (expected.causal, expected.window)
    dense = sdpa_mask(**arguments(rule, 11), allow_is_causal_skip=False)
    assert torch.equal(mask, dense) and torch.equal(mask[1:, :, 4:], dense[1:, :, 4:])
    assert torch.equal(mask.of_batch(5) & True, dense[:1].expand(5, -1, -1, -1))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "rule", [chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)), WINDOW(3)]
)
def test_other_masks_are_what_transformers_makes(rule):
    """Chunks come with a size but are not a window, and a window of unknown size is none either."""
    given = arguments(rule, 11, local_size=4)
    mask = lipscope_mask(**given)
    assert not isinstance(mask, PlainMask) and torch.equal(
        mask, sdpa_mask(**given, allow_is_causal_skip=False)
    )


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("position", [0, 5, 10])
def test_one_padded_token_makes_a_mask_of_its_own(position):
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, position] = False
    given = arguments(causal_mask_function, 11, attention_mask=real)
    mask = lipscope_mask(**given)
    assert not isinstance(mask, PlainMask) and torch.equal(
        mask, sdpa_mask(**given, allow_is_causal_skip=False)
    )


def test_as_many_keys_as_queries_or_no_plain_mask():
    given = arguments(causal_mask_function, 4) | {"kv_length": 7, "q_offset": 3}
    assert torch.equal(lipscope_mask(**given), sdpa_mask(**given, allow_is_causal_skip=False))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_nothing_on_the_way_writes_a_plain_mask_down(name, monkeypatch):
    model = load(make(name))
    assert model.preflight.routed

    def forbidden(mask):
        raise AssertionError("written down")

    monkeypatch.setattr(PlainMask, "written", forbidden)
    scopes = ["heads", "attention", "normed", "residual", "block", "model"]
    for site in model.sites(**sample(name, batch=2, n=6), scopes=scopes):
        J = jacobian(site.f, site.X)
        J.mv(torch.ones(*J.leading, *J.in_shape, dtype=J.dtype))
