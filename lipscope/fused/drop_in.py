"""`attend` under the name and signature of torch's attention, and in its place everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipscope.fused._torch_internals import (
    as_plain,
    classes_to_ask,
    overrides_functions,
    script_as_attention,
)
from lipscope.fused.arguments import (
    PLAIN,
    ArgumentError,
    ArgumentTypeError,
    check_alike,
    check_tensor,
    is_causal_bias,
)
from lipscope.fused.primitive import Rules, attend_by_rules, autocast_dtype


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
    double backward and backward through a tangent in O(n d) memory, in every dtype. Autocast, empty
    inputs and the meta device are handled as torch handles them. A tensor of a class with its own
    `__torch_function__` is handed to that class first, as in torch; tensors of other classes with
    operations of their own (DTensor, for example) are refused.

    Values differ from torch's on purpose in one case: rows of an additive mask that hold the same
    huge number at every key (`torch.finfo(dtype).min`, or -1e9 in float32). A constant added to all
    scores of a row cancels in the softmax, so such a row attends as if there were no mask. In
    torch, adding the mask rounds the scores away, and the row becomes the mean of all values. Rows
    masked by `-inf` or `False` are zero in both.

    Args:
        query: Shape `[..., H, n, k]`, or `[n, k]`.
        key: Shape `[..., G, n', k]`.
        value: Shape `[..., G, n', m]`.
        attn_mask: Broadcastable to `[..., H, n, n']`: boolean, `True` where a query may attend, or
            floating point, added to the scores; or a `CausalBias` of `torch.nn.attention.bias`.
            Treated as a constant.
        dropout_p: Must be 0: the derivatives of `attend` are those of a deterministic map.
        is_causal: Whether query `i` sees key `j` only if `j <= i`, as in torch also where there are
            more keys than queries. (:func:`attend` aligns the last query with the last key.)
        scale: Factor of the scores; `1/sqrt(k)` by default.
        enable_gqa: Whether the `H` query heads may share `G < H` key heads.

    Returns:
        The output, shape `[..., H, n, m]`, in the dtype of `query`. A fully masked row is zero.

    Raises:
        UserError: If shapes, dtypes or options do not fit, or if dropout is requested. It is also a
            `RuntimeError` or a `TypeError`, whichever torch raises.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
        >>> out = ls.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> same = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, same, atol=1e-6)
        True
    """
    tensors = (query, key, value, attn_mask)
    if any(type(x) not in PLAIN for x in tensors if x is not None):
        classes = [x for x in classes_to_ask(tensors) if not is_causal_bias(x)]
        if classes:
            options = {
                "attn_mask": attn_mask,
                "dropout_p": dropout_p or None,
                "is_causal": is_causal,
                "scale": scale,
                "enable_gqa": enable_gqa,
            }
            given = {name: x for name, x in options.items() if x is not None and x is not False}
            return _answer_of(classes, tensors[:3], given)
        # Handed on by a class, which has no say in the formulas of a backward pass.
        query = as_plain(query)
        key = as_plain(key)
        value = as_plain(value)
        attn_mask = attn_mask if is_causal_bias(attn_mask) else as_plain(attn_mask)
    _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    shift = 0
    if attn_mask is not None and is_causal_bias(attn_mask):
        attn_mask, shift = _rule_of(attn_mask, query, key)
        is_causal = attn_mask is None
    dtype = autocast_dtype(query.device)
    if dtype is not None:
        query, key, value = (_autocast(x, dtype) for x in (query, key, value))
        attn_mask = None if attn_mask is None else _autocast(attn_mask, dtype)
    check_alike(query, key, value)
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise ArgumentError(
                f"attn_mask must be boolean, float32 or of query's dtype, {query.dtype}, "
                f"got {attn_mask.dtype}"
            )
        if attn_mask.ndim < 2:
            attn_mask = attn_mask.expand(1, attn_mask.shape[0] if attn_mask.ndim else 1)
    if 0 in (*query.shape, *key.shape, *value.shape):
        return _empty(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    flat = query.ndim == 2 and key.ndim == 2 and value.ndim == 2
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    query, key, value = _same_heads(query, key, value, enable_gqa)
    rules = Rules(causal=is_causal, window=None, softcap=None, shift=shift)
    out = attend_by_rules(query, key, value, attn_mask, None, None, rules, scale)
    return out[0] if flat else out


script_as_attention(scaled_dot_product_attention)


def _check(
    query: Any, key: Any, value: Any, attn_mask: Any,
    dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
) -> None:  # fmt: skip
    """Raise a UserError for arguments that torch refuses as well, and for dropout."""
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not (name == "attn_mask" and (x is None or is_causal_bias(x))):
            check_tensor(name, x)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise ArgumentTypeError(f"{name} must be True or False, got {type(flag).__name__}")
    for name, number in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        if not hasattr(number, "__float__"):
            raise ArgumentTypeError(f"{name} must be a number, got {type(number).__name__}")
    if dropout_p:
        raise ArgumentError(
            f"dropout_p must be 0, got {dropout_p!r}: a tangent and the value it belongs to would "
            "see different random masks; put the model into eval mode or set its dropout to 0"
        )
    if attn_mask is not None and is_causal:
        raise ArgumentError(
            "attn_mask and is_causal exclude each other, as in torch; combine the masks"
        )
    if query.ndim < 2 or key.ndim < 2 or value.ndim < 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ArgumentError(f"query, key, value need at least 2 dimensions, got {shapes}")


def _rule_of(bias: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, int]:
    """The mask of a CausalBias, None where causal order with this shift is the same."""
    n = query.shape[-2]
    n_keys = key.shape[-2]
    # As in torch, the sizes in a bias that starts at the upper left are not looked at.
    if bias.seq_len_q == bias.seq_len_kv or bias.variant == type(bias.variant).UPPER_LEFT:
        return None, 0
    if (bias.seq_len_q, bias.seq_len_kv) == (n, n_keys) and 0 not in query.shape:
        return None, n_keys - n
    return bias._materialize(query.device), 0


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does for attention: every floating-point dtype but float64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _empty(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    is_causal: bool, scale: float | Tensor | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Attention with a dimension of size 0, where torch's own has all derivatives and no cost."""
    if isinstance(scale, Tensor):
        query = query * scale
        scale = 1.0
    if enable_gqa and 0 in (*key.shape[-3:-2], *value.shape[-3:-2]):
        # torch would divide by zero here, which ends the process.
        raise ArgumentError("enable_gqa=True needs at least one head of key and value")
    try:
        return torch.ops.aten.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except (RuntimeError, IndexError) as error:
        raise ArgumentError(str(error)) from error


def _same_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads broadcast as torch does; groups of heads only where they are asked for."""
    H = q.shape[-3]
    G = k.shape[-3]
    values = v.shape[-3]
    if H == G == values:
        return q, k, v
    if grouped:
        if H % G or H % values:
            raise ArgumentError(
                f"{H} query heads cannot share {G} key heads and {values} value heads evenly; "
                "both numbers must divide the number of query heads"
            )
        if values != G:
            k, v = (x.repeat_interleave(H // x.shape[-3], dim=-3) for x in (k, v))
        return q, k, v
    if len({H, G, values} - {1}) > 1:
        raise ArgumentError(
            f"query has {H} heads, key {G} and value {values}; "
            "pass enable_gqa=True to share key heads"
        )
    common = max(G, values)
    k, v = (x.expand(*x.shape[:-3], common, -1, -1) for x in (k, v))
    return q.expand(*q.shape[:-3], max(H, common), -1, -1), k, v


_TORCHS_OWN = torch.nn.functional.scaled_dot_product_attention

_lock = Lock()
_users = 0
_before = _TORCHS_OWN
"""How many contexts, in all threads, need the attribute replaced, and what it was before."""


class _Routing(TorchFunctionMode):
    """Sends torch's attention here also where a module imported the function by name."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _TORCHS_OWN:
            func = scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _Asking(_Routing):
    """Active while the classes of tensors are asked; a call they hand on comes back here."""

    def __init__(self, classes: Sequence[Any]):
        super().__init__()
        self.classes = classes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A class may recognize attention by the function it imported or by the attribute of
        # torch.nn.functional, and inside attend_everywhere these are two functions.
        replaced = nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
        if func is _TORCHS_OWN and replaced:
            kinds = {type(x) for x in (*args, *(kwargs or {}).values())}
            again = [x for x in self.classes if type(x) in kinds]
            with _Routing():
                answer = _ask(again, scaled_dot_product_attention, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        return super().__torch_function__(func, types, args, kwargs)


def _answer_of(classes: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention as the classes of these arguments define it; lipscope's if they hand it on."""
    with _Asking([x for x in classes if overrides_functions(x)]):
        answer = _ask(classes, _TORCHS_OWN, args, kwargs)
    if answer is NotImplemented:
        names = ", ".join(type(x).__name__ for x in classes)
        raise ArgumentTypeError(f"the tensor classes {names} define no attention")
    return answer


def _ask(classes: Sequence[Any], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The answer of the first class that has one to a call of func, or NotImplemented."""
    types = tuple(type(x) for x in classes)
    for x in classes:
        answer = x.__torch_function__(func, types, args, kwargs)
        if answer is not NotImplemented:
            return answer
    return NotImplemented


@contextmanager
def attend_everywhere() -> Iterator[None]:
    """Route `torch.nn.functional.scaled_dot_product_attention` through lipscope's.

    Inside the context every call of torch's attention, from any module and however it was imported,
    can be differentiated in forward mode and twice. That includes `nn.MultiheadAttention` and
    `nn.TransformerEncoderLayer`, whose fused inference path PyTorch does not take in the context.
    Code compiled or scripted before is not reached.

    The context acts in the thread that entered it. While it is open, other threads are routed too,
    but only calls of the attribute `torch.nn.functional.scaled_dot_product_attention`; functions
    imported by name and the fused inference path remain torch's there.

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
