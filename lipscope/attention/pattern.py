"""Who attends to whom: causal order, sliding window, masks, padding; and what becomes of a score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pattern:
    """Key j is visible to query i when all of these allow it; `tile` cuts out a block of rows and columns.

    causal:        j <= i + shift
    window:        j > i + shift - window
    mask:          boolean [..., H | 1, n, n'] (True: may attend), or additive in floating point
    queries, keys: boolean [..., n] and [..., n'], True for real tokens
    softcap:       score T becomes softcap * tanh(T / softcap)
    sinks:         [H], a logit per head that joins the denominator of the softmax
    """

    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    sinks: Tensor | None = None
    shift: int = 0

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
        """The same change to whatever differs from member to member: [B, H, n, n'] masks, [B, n] padding."""

        def apply(x: Tensor | None, members: int) -> Tensor | None:
            return x if x is None or x.ndim < members else change(x)

        return replace(self, mask=apply(self.mask, 4), queries=apply(self.queries, 2), keys=apply(self.keys, 2))

    def columns(self, rows: slice, n_keys: int) -> slice:
        """The keys that causal order and window leave to these rows."""
        stop = min(n_keys, rows.stop + self.shift) if self.causal else n_keys
        start = max(0, rows.start + self.shift - self.window + 1) if self.window else 0
        return slice(min(start, max(stop, 1) - 1), max(stop, 1))

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
        """The additive mask, if there is one."""
        return self.mask if self.mask is not None and self.mask.dtype != torch.bool else None
