"""Record the calls of layers while their model trains, inside torch.compile too.

A part that is compiled is recorded at its input and rerun without the compiler. Hooks inside would
be traced into the graph and change it, or be ignored by a graph that was compiled before they were
registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipscope._ambient import in_own_pass
from lipscope._torch_internals import (
    compiled_call,
    in_backward,
    set_compiled_call,
    tree_map,
    unless_gone,
)
from lipscope._types import UserError
from lipscope.models.capture import RecordedCall, watch_calls
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.wrapped import evaluating, is_compiled_copy, unwrapped


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


class Entry:
    """The outermost compiled part around some layers.

    It is either a module returned by torch.compile or one that was compiled in place.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = ref(part)
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | UserError | None = None
        self._hooks = ExitStack()

    @property
    def part(self) -> nn.Module:
        """The compiled module; an empty one if it no longer exists."""
        part = self._part()
        return nn.Module() if part is None else part

    def arm(self) -> None:
        """Start recording calls."""
        self._hooks.callback(hook(self.part, self._keep))

    def release(self) -> None:
        """Stop recording and forget the recorded call."""
        self._hooks.close()
        self._call = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not to_be_kept():
            return
        # The whole batch, since it is not known here which arguments have a row per sample; cloned,
        # since the model may modify its inputs in place.
        try:
            self._call = tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
            )
        except Exception as error:  # reported when the layers inside are measured
            self._call = UserError(str(error))

    def rerun(self) -> None:
        """Repeat the last call, if any, in evaluation mode on copies of the buffers."""
        if self._call is None:
            return
        if isinstance(self._call, UserError):
            raise self._call
        (args, kwargs), self._call = self._call, None
        self._hooks.close()  # the pass below is not the training's
        original = unwrapped(self.part)
        buffers = {name: b.clone() for name, b in original.named_buffers()}
        with torch.no_grad(), evaluating(original), uncompiled(self.part):
            functional_call(original, buffers, args, kwargs)


def entries(model: nn.Module) -> Iterator[Entry]:
    """The compiled parts of a model that are not inside another one."""
    if is_compiled_copy(model) or compiled_call(model) is not None:
        yield Entry(model)
        return
    for child in model.children():
        yield from entries(child)


def hook(
    part: nn.Module, tap: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Callable[[], None]:
    """Show `tap` the calls of a module, outside the compiler; return a function that removes it."""
    # A module compiled in place runs its hooks inside the graph, so the call itself is wrapped.
    call = compiled_call(part)
    if call is None:
        return watch_calls(part, tap)
    if not isinstance(call, _TappedCall):
        call = _TappedCall(part, call)
        set_compiled_call(part, call)
    call.taps.append(tap)

    def remove(part: nn.Module) -> None:
        call = compiled_call(part)
        if isinstance(call, _TappedCall) and tap in call.taps:
            call.taps.remove(tap)
            if not call.taps:
                set_compiled_call(part, call.inner)

    return unless_gone(part, remove)


class _TappedCall:
    """The compiled call of a module, shown to taps first; several monitors share one."""

    def __init__(self, part: nn.Module, inner: Callable[..., Any]) -> None:
        self.part = part
        self.inner = inner
        self.taps: list[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for tap in tuple(self.taps):
            tap(self.part, args, kwargs)
        return self.inner(*args, **kwargs)


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run the compiled parts of the module eagerly."""
    return torch.compiler.set_stance("force_eager") if any(entries(module)) else nullcontext()
