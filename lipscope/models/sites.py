"""The places where a model can be measured: which map, of which tokens, at which layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._ambient import live_modules, unaffected
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map
from lipscope.models.closed_form import (
    LargeMaskError,
    closed_form,
    projection_matrix,
    same,
    select_heads,
)
from lipscope.models.maps import Heads, Rerun
from lipscope.models.running import Host, Tap
from lipscope.models.structure import Layer
from lipscope.models.trace import Seen, Trace

NOT_PLAIN = "not plain self-attention"


class Memory:
    """Findings by module; a finding expires when the weights of its module change."""

    def __init__(self) -> None:
        self._findings: dict[nn.Module, tuple[tuple[tuple[int, int], ...], Any]] = {}

    def get(self, module: nn.Module) -> Any:
        """The finding about a module, or None."""
        weights, finding = self._findings.get(module, ((), None))
        return finding if weights == _mark(module) else None

    def keep(self, module: nn.Module, finding: Any) -> None:
        self._findings[module] = _mark(module), finding


def _mark(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Address and version of every weight; an in-place update changes only the version."""
    return tuple(
        (p.data_ptr(), -1 if p.is_inference() else p._version) for p in module.parameters()
    )


@dataclass(frozen=True, eq=False)
class Site(Displayed):
    """One map and its inputs. `lipscope.jacobian(f, X)` is a batch of len(members) Jacobians.

    layer:   counted from 0; None for the whole model
    members: (sample, head) for each Jacobian of the batch; head is None for all heads together
    f, X:    the map and the samples [B, n, d]; f is a SelfAttention in closed form if the module is
             plain self-attention (with its heads apart for scope heads), otherwise the module
             itself, differentiated by autograd
    offset:  a constant that the model adds to f(X) and f leaves out: the bias of an output
             projection
    """

    scope: str
    layer: int | None
    members: tuple[tuple[int, int | None], ...]
    f: Map
    X: Tensor
    offset: Tensor | None = None

    @property
    @unaffected
    def radius(self) -> Tensor:
        """R = max_i ||x_i||_2 for each member."""
        samples = torch.tensor([sample for sample, _ in self.members])
        return self.X.norm(dim=-1).amax(dim=-1).double().cpu()[samples]

    @unaffected
    def value(self) -> Tensor:
        """The model's own value at X."""
        with torch.no_grad():
            y = self.f(self.X)
        return y if self.offset is None else y + self.offset


@dataclass(frozen=True, eq=False)
class Survey:
    """The sites of one forward pass."""

    host: Host
    layers: list[Layer]
    trace: Trace
    memory: Memory
    _found: dict[int, SelfAttention | None] = field(default_factory=dict, repr=False)

    @unaffected
    def site(
        self, scope: str, layer: int | None = None, heads: Sequence[int] | None = None
    ) -> Site:
        """The map `scope` at a layer; `heads` restricts the scope heads to some of them."""
        with live_modules:  # another thread may have lent other weights to the modules
            return self._site(scope, layer, heads)

    def _site(self, scope: str, layer: int | None, heads: Sequence[int] | None) -> Site:
        if scope == "model":
            return self._model()
        assert layer is not None, f"scope {scope} needs a layer"
        match scope:
            case "heads":
                return self._heads(layer, heads)
            case "attention":
                return self._attention(layer)
            case "normed":
                return self._normed(layer)
            case "residual":
                return self._residual(layer)
            case "block":
                return self._rerun("block", layer, self._block(layer)[1])
            case "suffix":
                return self._suffix("suffix", layer)
        raise AssertionError(scope)

    def _heads(self, i: int, heads: Sequence[int] | None) -> Site:
        core, seen = self._core(i)
        chosen = tuple(range(self.layers[i].heads) if heads is None else heads)
        closed = self._closed(i)
        f = (
            Heads(host=self.host, module=core, call=seen.call, single=seen.single, heads=chosen)
            if closed is None
            else select_heads(closed, chosen).heads_apart()
        )
        members = tuple((sample, head) for sample, _ in seen.samples for head in chosen)
        return Site(scope="heads", layer=i, members=members, f=f, X=seen.call.hidden)

    def _attention(self, i: int) -> Site:
        (core, seen), projection = self._core(i), self.layers[i].projection
        if projection is None:
            raise UserError(
                f"layer {i} has no output projection that lipscope recognises, "
                "so scope attention is not available; use heads"
            )
        inside = projection in set(core.modules())
        tap, then = (Tap(projection, "output"), None) if inside else (None, projection)
        f = Rerun(self.host, core, call=seen.call, single=seen.single, tap=tap, then=then)
        site = Site(scope="attention", layer=i, members=seen.samples, f=f, X=seen.call.hidden)
        closed = self._closed(i)
        known = self.memory.get(projection)
        if closed is None or known == NOT_PLAIN:
            return site
        width = closed.V.shape[0] // closed.groups * closed.heads
        O, b = known or projection_matrix(self.host, projection, width)
        fast = replace(site, f=replace(closed, O=O), offset=b)
        # q, k and v agree, but a gate between heads and projection would still change the value.
        plain = known is not None or same(fast.value(), site.value())
        self.memory.keep(projection, (O, b) if plain else NOT_PLAIN)
        return fast if plain else site

    def _closed(self, i: int) -> SelfAttention | None:
        """The attention module of layer i in closed form, if it is plain self-attention."""
        if i not in self._found:
            core, seen = self._core(i)
            known = self.memory.get(core)
            found = None
            if known != NOT_PLAIN:
                try:
                    # Remembered projections save the probe; if they no longer fit, probe again.
                    found = closed_form(self.host, core, seen, known) if known else None
                    found = found or closed_form(self.host, core, seen)
                    self.memory.keep(core, found[1] if found else NOT_PLAIN)
                except LargeMaskError:
                    pass  # nothing to remember: a shorter text may have a closed form
            self._found[i] = found[0] if found else None
        return self._found[i]

    def _normed(self, i: int) -> Site:
        layer, (_, seen) = self.layers[i], self._block(i)
        if not layer.prenorm or layer.projection is None:
            raise UserError(
                f"{type(layer.block).__name__} (layer {i}) does not normalise its input before "
                "attention, so scope normed is not available; use residual"
            )
        if (core := self.trace.cores[i]) is not None and layer.core is not None:
            _check_tokens(layer.core, i, core)
        return self._rerun("normed", i, seen, Tap(layer.projection, "output"))

    def _residual(self, i: int) -> Site:
        layer, (_, seen) = self.layers[i], self._block(i)
        if layer.residual is None:
            raise UserError(
                f"{type(layer.block).__name__} (layer {i}) does not run attention as a separate "
                "sub-layer, so scope residual is not available; use block"
            )
        return self._rerun("residual", i, seen, layer.residual)

    def _rerun(self, scope: str, i: int, seen: Seen, tap: Tap | None = None) -> Site:
        block = self.layers[i].block
        assert block is not None
        f = Rerun(self.host, block, call=seen.call, single=seen.single, tap=tap)
        return Site(scope=scope, layer=i, members=seen.samples, f=f, X=seen.call.hidden)

    def _model(self) -> Site:
        # From the first block's tokens on: what precedes it looks up embeddings, which have no
        # derivative with respect to token ids.
        return replace(self._suffix("model", 0), layer=None)

    def _suffix(self, scope: str, i: int) -> Site:
        block, seen = self._block(i)
        inputs = self.trace.inputs
        f = Rerun(
            self.host,
            self.host.trunk,
            call=inputs.call,
            single=inputs.single,
            entry=block,
            entry_call=sum(layer.block is block for layer in self.layers[:i]),
        )
        return Site(scope=scope, layer=i, members=seen.samples, f=f, X=seen.call.hidden)

    def _core(self, i: int) -> tuple[nn.Module, Seen]:
        core = self.layers[i].core
        seen = self.trace.cores[i]
        assert core is not None and seen is not None
        if not self.layers[i].alone:
            raise UserError(
                f"{type(core).__name__} (layer {i}) is not a map of a single sequence of tokens, "
                "so scopes heads and attention are not available; use residual or block"
            )
        _check_tokens(core, i, seen)
        return core, seen

    def _block(self, i: int) -> tuple[nn.Module, Seen]:
        block = self.layers[i].block
        seen = self.trace.blocks[i]
        if block is None or seen is None:
            raise UserError(
                f"layer {i} is not part of a list of blocks, so scopes normed, residual, "
                "block, suffix and model are not available"
            )
        _check_tokens(block, i, seen)
        return block, seen


def _check_tokens(module: nn.Module, i: int, seen: Seen) -> None:
    shape = tuple(seen.call.hidden.shape)
    if len(shape) != 3:
        raise UserError(
            f"{type(module).__name__} (layer {i}) reads tokens of shape {shape}, "
            "not sequences [samples, tokens, size]"
        )
    if shape[1:] != tuple(seen.single.hidden.shape[1:]):
        raise UserError(
            f"{type(module).__name__} (layer {i}) concatenates its samples into shape {shape}; "
            "give one sample at a time"
        )
    rows = seen.single.hidden.shape[0]
    if rows != 1:
        raise UserError(
            f"{type(module).__name__} (layer {i}) cuts a sample into {rows} sequences, such as "
            "windows or frames, and this scope needs a single one; use scope residual, block, "
            "suffix or model"
        )
