"""Which keys a query sees (causal order, window, masks, padding), and how scores are modified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNDERFLOW = 760.0
"""Exponents this far below the largest give a weight of 0 in float64: exp(-746) already is 0."""

ENTRIES = 1 << 20
"""Number of mask entries processed at once."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Key j is visible to query i if all of these allow it; `tile` cuts out a block.

    causal:        j <= i + shift
    window:        j > i + shift - window
    mask:          boolean [..., H | 1, n, n'] (True: may attend), or additive in floating point;
                   the part shared by all visible keys of a row is taken out (`without_level`)
    queries, keys: boolean [..., n] and [..., n'], True for real tokens
    softcap:       score T becomes softcap * tanh(T / softcap)
    sinks:         [H], one logit per head that joins the denominator of the softmax
    scale:         factor of <q, k>; 1 where q includes it, as it does unless half precision would
                   round the product
    """

    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    sinks: Tensor | None = None
    shift: int = 0
    scale: float = 1.0

    def tile(self, rows: slice, cols: slice) -> Pattern:
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., cols]
        return replace(
            self,
            mask=mask,
            queries=None if self.queries is None else self.queries[..., rows],
            keys=None if self.keys is None else self.keys[..., cols],
            shift=self.shift + rows.start - cols.start,
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """Apply a change to whatever has a batch dimension: [B, H, n, n'] masks, [B, n] padding."""

        def apply(x: Tensor | None, members: int) -> Tensor | None:
            return x if x is None or x.ndim < members else change(x)

        mask = None if self.mask is None else distinct(self.mask, dims=(-2, -1))
        return replace(
            self, mask=apply(mask, 4), queries=apply(self.queries, 2), keys=apply(self.keys, 2)
        )

    def columns(self, rows: slice, n_keys: int) -> slice:
        """The range of keys that causal order and window leave to these rows."""
        stop = min(n_keys, rows.stop + self.shift) if self.causal else n_keys
        start = max(0, rows.start + self.shift - self.window + 1) if self.window else 0
        return slice(min(start, max(stop, 1) - 1), max(stop, 1))

    def blocks(self, n: int, n_keys: int, height: int) -> Iterator[tuple[slice, slice, Pattern]]:
        """Blocks of `height` rows, the keys they can see, and the pattern between the two."""
        for start in range(0, n, height):
            rows = slice(start, min(n, start + height))
            cols = self.columns(rows, n_keys)
            yield rows, cols, self.tile(rows, cols)

    def visible(self, n_queries: int, n_keys: int, device: torch.device) -> Tensor | None:
        """Boolean, broadcastable to [..., H, n, n']; None where everything is visible."""
        seen: Tensor | None = None
        if self.causal or self.window:
            i = torch.arange(n_queries, device=device)[:, None] + self.shift
            j = torch.arange(n_keys, device=device)[None, :]
            seen = j <= i if self.causal else None
            if self.window:
                near = j > i - self.window
                seen = near if seen is None else seen & near
        boolean = self.mask if self.mask is not None and self.mask.dtype == torch.bool else None
        keys = None if self.keys is None else self.keys[..., None, None, :]
        queries = None if self.queries is None else self.queries[..., None, :, None]
        for part in (boolean, keys, queries):
            if part is not None:
                seen = part if seen is None else seen & part
        return seen

    @property
    def bias(self) -> Tensor | None:
        """The additive mask, if any; expanded rows, heads or members are kept only once."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return distinct(self.mask, dims=range(-self.mask.ndim, 0))

    def bias_left_by_head(self, n: int, n_keys: int, largest_score: Tensor) -> Tensor:
        """How much the additive mask and the sinks add to the size of the logits, in float64.

        largest_score [..., H | 1] bounds the |score| of every visible key. What counts is the mask
        without each row's largest entry, and the sinks, which shift against it. Entries so negative
        that the weight is 0 for any scores do not count: never more than 760 + 2 largest_score.
        """
        largest_score = largest_score.double()
        left = torch.zeros_like(largest_score)
        cut = (UNDERFLOW + 2 * largest_score)[..., None, None]
        bias = self.bias
        if bias is None:
            level = left.new_zeros(1, 1)
            return left if self.sinks is None else torch.maximum(left, self._sinks_left(level, cut))
        if bias.shape[-2] == 1 and not (self.causal or self.window or self.queries is not None):
            n = 1  # every row is like the first
        per_row = n_keys * torch.broadcast_shapes(cut.shape[:-2], bias.shape[:-2]).numel()
        for rows, cols, tile in self.blocks(n, n_keys, max(1, ENTRIES // per_row)):
            seen = tile.visible(rows.stop - rows.start, cols.stop - cols.start, left.device)
            assert tile.bias is not None
            rest, level = without_level(tile.bias.double(), seen)
            counts = rest >= -cut if seen is None else seen & (rest >= -cut)
            left = torch.maximum(left, torch.where(counts, -rest, 0.0).amax(dim=(-2, -1)))
            if self.sinks is not None:
                left = torch.maximum(left, self._sinks_left(level, cut))
        return left

    def _sinks_left(self, level: Tensor, cut: Tensor) -> Tensor:
        """The largest |sink - level of a row| that still carries weight, per head: [..., H]."""
        assert self.sinks is not None
        moved = (self.sinks[:, None, None].double() - level).abs()
        return torch.where(moved <= cut, moved, 0.0).amax(dim=(-2, -1))


def distinct(x: Tensor, dims: Iterable[int]) -> Tensor:
    """x narrowed to one entry along those of `dims` in which it is expanded (stride 0)."""
    for dim in dims:
        x = x.narrow(dim, 0, 1) if x.stride(dim) == 0 and x.shape[dim] > 1 else x
    return x


def without_level(bias: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """An additive mask minus the largest entry each row sees, and that entry [..., n | 1, 1].

    A row that sees no finite entry is left as it is.
    """
    # A softmax ignores what all logits of a row share, but score + (-1e9) has lost the score: the
    # shared part must be removed from the mask before the two are added.
    level = (bias if seen is None else torch.where(seen, bias, -torch.inf)).amax(-1, keepdim=True)
    level = level.masked_fill(level == -torch.inf, 0.0)
    return bias - level, level
