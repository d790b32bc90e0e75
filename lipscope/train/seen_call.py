"""The call of a layer as a hook sees it, one sample of the batch kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipscope._ambient import in_own_pass
from lipscope._torch_internals import in_backward
from lipscope._types import UserError
from lipscope.models.capture import RecordedCall
from lipscope.nn.attention_layer import AttentionLayer


def to_be_kept() -> bool:
    """Whether a call seen by a hook belongs to the training's own forward pass.

    It does not while a compiler traces the layer, since watching must not change the graph, nor in
    a backward pass, where gradient checkpointing reruns layers in another order, nor while another
    call of lipscope measures the model.
    """
    return not torch.compiler.is_compiling() and not in_backward() and not in_own_pass()


def first_sample(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
    """The call for the first sample of the batch."""
    if isinstance(module, nn.MultiheadAttention):
        return _first_of_torch(module, args, kwargs)
    if isinstance(module, AttentionLayer):
        return _first_of_ours(**dict(zip(("X", "padding"), args, strict=False)), **kwargs)
    if not args or not isinstance(args[0], Tensor) or args[0].ndim not in (2, 3):
        raise UserError(
            f"{type(module).__name__} is not called with tokens [B, n, d] or [n, d] as its first "
            "argument, so it cannot be measured"
        )
    X, *others = args
    X = X if X.ndim == 3 else X[None]
    B, n = X.shape[:2]

    def sample(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Guessing wrong would measure the layer at arguments it never saw.
        if n == B > 1 and value.shape[:1] == (B,):
            raise UserError(
                f"{type(module).__name__} reads a tensor of shape {tuple(value.shape)} in addition "
                f"to its {B} samples of {n} tokens: it could have one row per sample or one per "
                "token; use another batch size"
            )
        return _kept(value[:1] if B > 1 and value.shape[:1] == (B,) else value)

    rest = tuple(sample(value) for value in others)
    return RecordedCall(
        (_kept(X[:1]), *rest), {key: sample(value) for key, value in kwargs.items()}
    )


def _first_of_ours(X: Tensor, padding: Tensor | None = None) -> RecordedCall:
    """The same for lipscope's attention: its real tokens, since padding is not part of the map."""
    X, padding = (X[0], None if padding is None else padding[0]) if X.ndim == 3 else (X, padding)
    if padding is not None and not padding.any():
        raise UserError(
            "the first sample of the batch is padding only; put a sample with tokens first"
        )
    return RecordedCall((_kept(X if padding is None else X[padding])[None],), {})


def _first_of_torch(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RecordedCall:
    """The same for nn.MultiheadAttention, whose arguments are known by name."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query = given["query"]
    if query.is_nested:
        raise UserError(
            "nn.MultiheadAttention is called with nested tensors, which cannot be measured; "
            "set use_nested_tensor to False in the encoder"
        )
    if given["key"] is not query or given["value"] is not query:
        raise UserError(
            "nn.MultiheadAttention is called with a key or value other than its query: "
            "it is not self-attention and cannot be measured"
        )
    batched = query.ndim == 3
    if batched and not module.batch_first:
        query = query.transpose(0, 1)
    padding = given.get("key_padding_mask")
    mask = given.get("attn_mask")
    if mask is not None and mask.ndim == 3:
        if not (mask[: module.num_heads] == mask[0]).all():
            raise UserError("attn_mask differs from head to head; use one mask for all heads")
        mask = mask[0]
    padding = None if padding is None else _kept(padding[:1] if batched else padding[None])
    mask = None if mask is None else _kept(mask)
    return RecordedCall(
        (_kept(query[:1] if batched else query[None]),),
        {"key_padding_mask": padding, "attn_mask": mask},
    )


def real_tokens(padding: Tensor) -> Tensor:
    """Which tokens are real, from torch's key_padding_mask (True or -inf for padding)."""
    if padding.dtype == torch.bool:
        return ~padding
    if not ((padding == 0) | (padding == -torch.inf)).all():
        raise UserError(
            "key_padding_mask must be boolean or contain only 0 and -inf, got other numbers"
        )
    return padding == 0


def _kept(x: Tensor) -> Tensor:
    return x.detach().clone()
