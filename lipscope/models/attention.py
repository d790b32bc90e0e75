"""Run a model on lipscope's attention through transformers' interface, then restore it.

Masks are represented by their rule instead of by n^2 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from lipscope._ambient import own_pass
from lipscope._torch_internals import tree_map
from lipscope._types import UserError
from lipscope.fused.pattern import Pattern, distinct, without_level
from lipscope.fused.primitive import Rules, attend_by_rules
from lipscope.models._transformers_internals import (
    ATTENTION,
    EXPERTS,
    AttentionMaskInterface,
    sdpa_mask,
)

ROWS = 1 << 26
"""Maximum number of mask entries that are materialised at a time."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Query i sees key j if all of these allow it.

    causal: j <= i + ahead
    window: j > i + ahead - window
    chunk:  i and j lie in the same chunk of this many tokens
    real:   boolean [B, 1, 1, n], the keys that are not padding
    """

    causal: bool = False
    window: int | None = None
    ahead: int = 0
    chunk: int | None = None
    real: Tensor | None = None

    def visible(self, rows: slice, n: int, device: torch.device) -> Tensor | None:
        """Some rows of the mask for n tokens, [B | 1, 1, rows, n]; None if they see everything."""
        pattern = Pattern(self.causal, self.window, mask=self.real, shift=self.ahead)
        seen = pattern.tile(rows, slice(0, n)).visible(rows.stop - rows.start, n, device)
        if self.chunk is not None:
            chunks = torch.arange(n, device=device) // self.chunk
            same = chunks[rows, None] == chunks
            seen = same if seen is None else seen & same
        return seen


class PlainMask(Tensor):
    """A boolean mask [B, 1, n, n] known by its rule.

    It becomes an ordinary tensor only when a model computes with it.
    """

    rule: Rule

    @staticmethod
    def __new__(cls, shape: torch.Size, device: torch.device, rule: Rule) -> PlainMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.rule = rule
        return mask

    def of_members(self, members: Tensor) -> PlainMask:
        """The mask of some members of the batch."""
        real = self.rule.real
        if real is not None and len(real) > 1:
            real = real[members.to(real.device)]
        shape = torch.Size((len(members), *self.shape[1:]))
        return PlainMask(shape, self.device, replace(self.rule, real=real))

    def written(self) -> Tensor:
        """The mask as an ordinary tensor."""
        n = self.shape[-1]
        seen = self.rule.visible(slice(0, n), n, self.device)
        return (
            torch.ones((), dtype=torch.bool, device=self.device) if seen is None else seen
        ).expand(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another signature
        cls,
        operation: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_written, (args, kwargs or {}))
        return operation(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's also takes the contents
        return f"PlainMask({tuple(self.shape)}, {self.rule})"


def _written(leaf: Any) -> Any:
    return leaf.written() if isinstance(leaf, PlainMask) else leaf


def lipscope_mask(**arguments: Any) -> Tensor | None:
    """The registered mask function: transformers' own mask, True where a query may attend.

    The result is a PlainMask if the mask follows one of the rules it knows. Rows are compared with
    every candidate rule, a block of rows at a time. None means that everything is visible.
    """
    n = arguments["q_length"]
    keys = arguments["kv_length"]
    start = arguments.get("q_offset", 0)
    # With a cache (n != keys, or an offset on the device) the rules below would be shifted.
    if n != keys or isinstance(start, Tensor):
        return _rows(arguments, start, n)
    device = torch.device(arguments.get("device", "cpu"))
    batch = arguments["batch_size"]
    # Which keys are not padding, [B, 1, 1, n]; None if all are real, or it is not said by key.
    real = arguments.get("attention_mask")
    if isinstance(real, Tensor) and tuple(real.shape) == (batch, keys) and not real.bool().all():
        real = real.bool()[:, None, None, :]
    else:
        real = None
    # The simplest rules first; size is that of windows and chunks.
    candidates = [Rule(real=real), Rule(causal=True, real=real)]
    size = arguments.get("local_size")
    if size:
        candidates += [
            Rule(causal=True, window=size, real=real),
            Rule(causal=True, window=2 * size + 1, ahead=size, real=real),
            Rule(causal=True, chunk=size, real=real),
        ]
    height = max(1, ROWS // (keys * batch))
    for first in range(0, n, height):
        rows = slice(first, min(n, first + height))
        part = _rows(arguments, start + first, rows.stop - first)
        if part is None:
            return None
        fitting = []
        for rule in candidates:
            seen = rule.visible(rows, n, device)
            if part.all() if seen is None else torch.equal(part, seen.expand_as(part)):
                fitting.append(rule)
        candidates = fitting
        if not candidates:  # packed sequences or an unknown rule: write the mask down
            return part if rows.stop - first == n else _rows(arguments, start, n)
    return PlainMask(torch.Size((batch, 1, n, keys)), device, candidates[0])


def _rows(arguments: dict[str, Any], start: Any, count: int) -> Tensor | None:
    """Some rows of the mask that transformers would create."""
    # transformers may skip a plain causal mask and rely on is_causal; lipscope needs the mask.
    return sdpa_mask(
        **{**arguments, "q_length": count, "q_offset": start, "allow_is_causal_skip": False}
    )


NAME = "lipscope"

FORGOTTEN = 32
"""A score up to 16 added to -32 / eps is lost in rounding: eager attention has forgotten it."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Arguments of an attention call: q [B, H, n, k], k [B, G, n', k], v [B, G, n', m], rules.

    causal, window, ahead, chunk: see `Rule`
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    causal: bool
    window: int | None
    mask: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    ahead: int = 0
    chunk: int | None = None

    def output(self) -> Tensor:
        """Every head before the output projection, [B, H, n, m]."""
        if self.chunk is not None:  # chunks of tokens see only each other
            parts = []
            for start in range(0, self.q.shape[-2], self.chunk):
                cut = slice(start, start + self.chunk)
                pattern = Pattern(mask=self.mask).tile(cut, cut)
                q, k, v = (x[..., cut, :] for x in (self.q, self.k, self.v))
                parts.append(replace(self, q=q, k=k, v=v, mask=pattern.mask, chunk=None).output())
            return torch.cat(parts, dim=-2)
        rules = Rules(self.causal, self.window, self.softcap, shift=self._shift)
        return attend_by_rules(
            self.q, self.k, self.v, self.mask, None, self.sinks, rules, self.scale
        )

    @property
    def _shift(self) -> int:
        return self.k.shape[-2] - self.q.shape[-2] + self.ahead

    def with_mask(self, n: int) -> AttentionCall:
        """The same call with a mask of n tokens for what `attend` has no argument for."""
        if not self.ahead and self.chunk is None:
            return self
        mask = self.mask
        rule = Rule(self.causal, self.window, self.ahead, self.chunk)
        seen = rule.visible(slice(0, n), n, self.q.device)
        assert seen is not None
        if mask is not None and mask.dtype != torch.bool:
            mask = torch.where(seen, mask, -torch.inf)
        else:
            mask = seen[None, None] if mask is None else seen & mask
        return replace(self, mask=mask, causal=False, window=None, ahead=0, chunk=None)

    def alone(self, heads: Tensor) -> AttentionCall:
        """Head heads[r] of member r only, with its mask and sink; members replace the head axis."""
        member = torch.arange(len(heads), device=self.q.device)
        group = heads // (self.q.shape[1] // self.k.shape[1])
        mask = self.mask
        if mask is not None and mask.ndim == 4:
            # Indexing copies: drop broadcast dimensions first, or an n x n mask is written out.
            mask = distinct(mask, dims=(-2, -1))
            mask = mask.expand(len(heads), self.q.shape[1], -1, -1)[member, heads]
        return replace(
            self,
            q=self.q[member, heads],
            k=self.k[member, group],
            v=self.v[member, group],
            mask=mask,
            sinks=None if self.sinks is None else self.sinks[heads],
        )

    def largest_score(self) -> Tensor:
        """A bound on the largest |logit| of each head as rounding sees it; float64 [B, H].

        The scores by Cauchy-Schwarz, before any softcap, plus the part of an additive mask and of
        the sinks that matters.
        """
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        q, k = (x.norm(dim=-1).amax(dim=-1).double() for x in (self.q, self.k))
        scores = abs(scale) * q * k.repeat_interleave(q.shape[-1] // k.shape[-1], dim=-1)
        n = self.q.shape[-2]
        n_keys = self.k.shape[-2]
        # Without chunks: more is visible, and the bound no smaller.
        rule = Pattern(
            self.causal, self.window, mask=self.mask, sinks=self.sinks, shift=self._shift
        )
        capped = scores if self.softcap is None else scores.clamp_max(self.softcap)
        return scores + rule.bias_left_by_head(n, n_keys, capped)


Listener = Callable[[AttentionCall], Tensor]
_listener: ContextVar[Listener | None] = ContextVar("lipscope_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass every attention call to `listener`, which returns the heads' output [B, H, n, m]."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def lipscope_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The registered attention function, with transformers' own signature.

    Without a mask everything is visible, as in eager attention; `lipscope_mask` always spells out
    causal order. If an argument in `unused` matters to eager attention, the preflight finds out.
    """
    if dropout:
        raise UserError(
            f"{type(module).__name__} attends with dropout {dropout}, and a random map cannot be "
            "measured; set its dropout to 0"
        )
    plain = attention_mask if isinstance(attention_mask, PlainMask) else None
    rule = Rule() if plain is None else plain.rule
    mask = attention_mask if plain is None else rule.real
    mask, lost = _with_bias(mask, position_bias, sinks=s_aux is not None)
    call = AttentionCall(
        module=module,
        q=query if lost is None else query.masked_fill(lost, 0.0),
        k=key,
        v=value,
        scale=scaling,
        causal=rule.causal,
        window=rule.window,
        mask=mask,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.to(query.dtype),
        ahead=rule.ahead,
        chunk=rule.chunk,
    )
    # Weights are frozen during a measurement: what requires a gradient depends on the input.
    for part in (call.mask, call.sinks):
        if torch.is_grad_enabled() and part is not None and part.requires_grad:
            raise UserError(
                f"{type(module).__name__} adds a bias to its scores that depends on the input"
            )
    listener = _listener.get()
    heads = call.output() if listener is None else listener(call)
    return heads.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, lipscope_attention)
AttentionMaskInterface.register(NAME, lipscope_mask)


@contextmanager
def using_attention(model: nn.Module, implementation: str = NAME) -> Iterator[None]:
    """Run the model on `implementation`, in evaluation mode without a cache; then restore it.

    Other threads that measure wait meanwhile. A thread that trains the model does not: what it
    changes stays as it left it, and the measurement is refused.
    """
    with own_pass():
        wanted = {ATTENTION: implementation, EXPERTS: "eager", "use_cache": False}
        # Modes one by one: module.eval() would run code of the model's own.
        modes = [(module, module.training) for module in model.modules()]
        before = [
            (config, name, vars(config)[name])
            for config in configs(model)
            for name in wanted
            if name in vars(config)
        ]
        # What a model computes from its weights and keeps is of the dtype of the measurement.
        own = vars(nn.Module()).keys()
        caches = [
            (value, dict(value))
            for module, _ in modes
            for name, value in vars(module).items()
            if name not in own and type(value) is dict
        ]
        weights = _versions(model)
        kept = True
        try:
            for module, _ in modes:
                module.training = False
            for config, name, _ in before:
                vars(config)[name] = wanted[name]
            yield
        finally:
            for cache, entries in caches:
                cache.clear()
                cache.update(entries)
            for config, name, value in before:
                if vars(config).get(name) == wanted[name]:
                    vars(config)[name] = value
                else:
                    kept = False
            for module, training in modes:
                if module.training:
                    kept = False
                else:
                    module.training = training
        if not kept or _versions(model) != weights:
            raise UserError(
                f"this {type(model).__name__} was changed while it was measured, by its own "
                "forward pass or by a training loop in another thread; measure between the steps "
                "of a loop, or a copy made with copy.deepcopy"
            )


def _versions(model: nn.Module) -> list[int]:
    """How often each weight was changed in place."""
    return [p._version for p in model.parameters() if not p.is_inference()]


def configs(model: nn.Module) -> list[PretrainedConfig]:
    """Every configuration that some part of the model reads, without duplicates."""
    queue = [
        c
        for c in (getattr(module, "config", None) for module in model.modules())
        if isinstance(c, PretrainedConfig)
    ]
    found: dict[int, PretrainedConfig] = {}
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue += [c for c in vars(config).values() if isinstance(c, PretrainedConfig)]
    return list(found.values())


def _with_bias(
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Combine mask and position bias: boolean if there is only visibility, else additive with -inf.

    Additive masks spell "invisible" as the most negative number of their dtype, or close to it. In
    a row where every key has such a number (a padded query), eager attention adds it to the scores,
    loses them in rounding, and weighs keys by the mask alone. These rows, if any, are returned next
    to the mask as [..., n | 1, 1]: their scores are 0. If there are sinks, the sinks take all the
    weight, as in a row that sees nothing.
    """
    added = mask if mask is not None and mask.dtype != torch.bool else None
    if bias is None and added is None:
        return mask, None
    bias, added = (None if x is None else distinct(x, dims=(-2, -1)) for x in (bias, added))
    if bias is None or added is None:
        whole = parts = bias if added is None else added
    else:
        # Adding a huge constant at all keys of a row would round the bias away, although softmax
        # ignores the constant: take it off first.
        whole = bias + added
        parts = whole if sinks else bias + without_level(added, None)[0]
    assert whole is not None and parts is not None
    if mask is not None and mask.dtype == torch.bool:
        whole, parts = (torch.where(mask, x, -torch.inf) for x in (whole, parts))
    forgotten = -FORGOTTEN / torch.finfo(whole.dtype).eps
    settled = torch.where(whole < forgotten, -torch.inf, parts)
    level = whole.amax(dim=-1, keepdim=True)
    lost = (level < forgotten) & (level > -torch.inf)
    if sinks or not bool(lost.any()):
        return settled, None
    return torch.where(lost, whole - level, settled), lost
