"""`attend` under the name and signature of torch's attention, and in its place everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipscope._types import UserError
from lipscope.attention.primitive import Rules, attend_by_rules


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with torch's signature and conventions, and all derivatives of :func:`attend`.

    A drop-in for `torch.nn.functional.scaled_dot_product_attention` that supports forward mode,
    double backward and backward through a tangent in O(n d) memory, in every dtype.

    Args:
        query: Shape `[..., H, n, k]`, or `[n, k]`.
        key: Shape `[..., G, n', k]`.
        value: Shape `[..., G, n', m]`.
        attn_mask: Broadcastable to `[..., H, n, n']`: boolean, `True` where a query may attend, or
            floating point, added to the scores. Treated as a constant.
        dropout_p: Must be 0: the derivatives of `attend` are those of a deterministic map.
        is_causal: Whether query `i` sees key `j` only if `j <= i`, as in torch also where there are
            more keys than queries. (:func:`attend` aligns the last query with the last key.)
        scale: Factor of the scores; `1/sqrt(k)` by default.
        enable_gqa: Whether the `H` query heads may share `G < H` key heads.

    Returns:
        The output, shape `[..., H, n, m]`, in the dtype of `query`. A fully masked row is zero.

    Raises:
        UserError: If shapes or options do not fit, or if dropout is requested.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
        >>> out = ls.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> same = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, same, atol=1e-6)
        True
    """
    if dropout_p:
        raise UserError(
            f"dropout_p must be 0, got {dropout_p!r}: a tangent and the value it belongs to would "
            "see different random masks; put the model into eval mode or set its dropout to 0"
        )
    if attn_mask is not None and is_causal:
        raise UserError(
            "attn_mask and is_causal exclude each other, as in torch; combine the masks"
        )
    if query.ndim < 2 or key.ndim < 2 or value.ndim < 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise UserError(f"query, key, value need at least 2 dimensions, got {shapes}")
    flat = query.ndim == 2 and key.ndim == 2 and value.ndim == 2
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    if attn_mask is not None and attn_mask.ndim < 2:
        attn_mask = attn_mask.expand(1, attn_mask.shape[0] if attn_mask.ndim else 1)
    query, key, value = _same_heads(query, key, value, enable_gqa)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    rules = Rules(causal=is_causal, window=None, softcap=None, shift=0)
    out = attend_by_rules(query, key, value, attn_mask, None, None, rules, scale)
    return out[0] if flat else out


def _same_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads broadcast as torch does; groups of heads only where they are asked for."""
    H, G, values = q.shape[-3], k.shape[-3], v.shape[-3]
    if values != G:
        common = max(G, values)
        if {G, values} != {1, common}:
            raise UserError(f"key has {G} heads and value {values}; they must agree")
        k, v = (x.expand(*x.shape[:-3], common, -1, -1) for x in (k, v))
        G = common
    if H == 1 < G:
        return q.expand(*q.shape[:-3], G, -1, -1), k, v
    if G not in (1, H) and not grouped:
        raise UserError(f"query has {H} heads and key {G}; pass enable_gqa=True to share key heads")
    return q, k, v


_TORCHS_OWN = torch.nn.functional.scaled_dot_product_attention

_lock, _users, _before = Lock(), 0, _TORCHS_OWN
"""How many contexts, in all threads, need the attribute replaced, and what it was before."""


class _Routing(TorchFunctionMode):
    """Sends torch's attention here also where a module imported the function by name."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _TORCHS_OWN:
            func = scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@contextmanager
def attend_everywhere() -> Iterator[None]:
    """Route `torch.nn.functional.scaled_dot_product_attention` through lipscope's.

    Inside the context every call of torch's attention, from any module and however it was imported,
    can be differentiated in forward mode and twice. Two things are out of its reach: the fused
    inference path of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, which does not call
    it, and code compiled before.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> x, dx = torch.randn(2, 1, 4, 8).unbind()
        >>> def f(x):
        ...     return torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> with ls.attend_everywhere():
        ...     value, tangent = torch.func.jvp(f, (x,), (dx,))
        >>> tangent.shape
        torch.Size([1, 4, 8])
    """
    # Two ways, because neither reaches everything: torch switches a mode off inside its own
    # composite functions (nn.MultiheadAttention calls one), and an attribute is not looked up by
    # code that imported the function by name.
    global _before, _users
    with _lock:
        if _users == 0:
            _before = torch.nn.functional.scaled_dot_product_attention
            torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
        _users += 1
    try:
        with _Routing():
            yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.nn.functional.scaled_dot_product_attention = _before
