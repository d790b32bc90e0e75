"""The places where a model can be measured: which map, of which tokens, at which layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._ambient import live_modules, unaffected
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import Map
from lipscope.models.capture import RecordedCall, Tap, capture
from lipscope.models.closed_form import (
    LargeMaskError,
    closed_form,
    projection_matrix,
    same,
    select_heads,
)
from lipscope.models.maps import Heads, ModelRunner, Rerun
from lipscope.models.scopes import SCOPES
from lipscope.models.structure import Layer

NOT_PLAIN = "not plain self-attention"


Memory = dict[nn.Module, tuple[tuple[tuple[int, int], ...], Any]]
"""Findings by module; a finding expires when the weights of its module change."""


def _remembered(memory: Memory, module: nn.Module) -> Any:
    """The finding about a module, or None."""
    weights, finding = memory.get(module, ((), None))
    return finding if weights == _mark(module) else None


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
    """The sites of one forward pass.

    inputs:        the call of the model itself
    cores, blocks: for each layer, the calls of its attention module and of its block
    """

    runner: ModelRunner
    layers: list[Layer]
    inputs: RecordedCall
    cores: list[RecordedCall | None]
    blocks: list[RecordedCall | None]
    memory: Memory
    _found: dict[int, SelfAttention | None] = field(default_factory=dict, repr=False)

    @unaffected
    def site(
        self, scope: str, layer: int | None = None, heads: Sequence[int] | None = None
    ) -> Site:
        """The map `scope` at a layer; `heads` restricts the scope heads to some of them."""
        kind = SCOPES[scope]
        assert layer is not None or kind.per == "model", f"scope {scope} needs a layer"
        build = resolve_name(kind.site)
        with live_modules:  # another thread may have lent other weights to the modules
            found = build(self, layer, heads) if kind.per == "head" else build(self, layer)
        return replace(found, scope=scope, layer=None if kind.per == "model" else layer)

    def heads(self, i: int, heads: Sequence[int] | None = None) -> Site:
        """The heads of layer i, each by itself."""
        core, call = self._core(i)
        chosen = tuple(range(self.layers[i].heads) if heads is None else heads)
        closed = self._closed(i)
        f = (
            Heads(runner=self.runner, module=core, call=call, heads=chosen)
            if closed is None
            else select_heads(closed, chosen).heads_apart()
        )
        members = tuple((sample, head) for sample, _ in call.samples for head in chosen)
        return Site(scope="heads", layer=i, members=members, f=f, X=call.hidden)

    def attention(self, i: int) -> Site:
        """The attention module of layer i with its output projection."""
        core, call = self._core(i)
        projection = self.layers[i].projection
        if projection is None:
            raise UserError(
                f"layer {i} has no output projection that lipscope recognises, "
                "so scope attention is not available; use heads"
            )
        inside = projection in set(core.modules())
        tap, then = (Tap(projection, "output"), None) if inside else (None, projection)
        f = Rerun(self.runner, core, call=call, tap=tap, then=then)
        site = Site(scope="attention", layer=i, members=call.samples, f=f, X=call.hidden)
        closed = self._closed(i)
        known = _remembered(self.memory, projection)
        if closed is None or known == NOT_PLAIN:
            return site
        width = closed.V.shape[0] // closed.groups * closed.heads
        O, b = known or projection_matrix(self.runner, projection, width)
        fast = replace(site, f=replace(closed, O=O), offset=b)
        # q, k and v agree, but a gate between heads and projection would still change the value.
        plain = known is not None or same(fast.value(), site.value())
        self.memory[projection] = _mark(projection), (O, b) if plain else NOT_PLAIN
        return fast if plain else site

    def normed(self, i: int) -> Site:
        """The normalisation of layer i and its attention."""
        block, _ = self._block(i)
        layer = self.layers[i]
        if not layer.prenorm or layer.projection is None:
            raise UserError(
                f"{type(block).__name__} (layer {i}) does not normalise its input before "
                "attention, so scope normed is not available; use residual"
            )
        core = self.cores[i]
        if core is not None and layer.core is not None:
            _check_tokens(layer.core, i, core)
        return self.block(i, Tap(layer.projection, "output"))

    def residual(self, i: int) -> Site:
        """The attention sub-layer of layer i."""
        block, _ = self._block(i)
        tap = self.layers[i].residual
        if tap is None:
            raise UserError(
                f"{type(block).__name__} (layer {i}) does not run attention as a separate "
                "sub-layer, so scope residual is not available; use block"
            )
        return self.block(i, tap)

    def block(self, i: int, tap: Tap | None = None) -> Site:
        """The block of layer i, up to `tap`."""
        block, call = self._block(i)
        f = Rerun(self.runner, block, call=call, tap=tap)
        return Site(scope="block", layer=i, members=call.samples, f=f, X=call.hidden)

    def suffix(self, i: int) -> Site:
        """Everything from the block of layer i on."""
        block, call = self._block(i)
        f = Rerun(
            self.runner,
            self.runner.trunk,
            call=self.inputs,
            entry=block,
            entry_call=sum(layer.block is block for layer in self.layers[:i]),
        )
        return Site(scope="suffix", layer=i, members=call.samples, f=f, X=call.hidden)

    def model(self, _: int | None = None) -> Site:
        """Everything from the first block on; embeddings of token ids have no derivative."""
        return self.suffix(0)

    def _closed(self, i: int) -> SelfAttention | None:
        """The attention module of layer i in closed form, if it is plain self-attention."""
        if i not in self._found:
            core, call = self._core(i)
            known = _remembered(self.memory, core)
            found = None
            if known != NOT_PLAIN:
                try:
                    # Remembered projections save the probe; if they no longer fit, probe again.
                    found = closed_form(self.runner, core, call, known) if known else None
                    found = found or closed_form(self.runner, core, call)
                    self.memory[core] = _mark(core), found[1] if found else NOT_PLAIN
                except LargeMaskError:
                    pass  # nothing to remember: a shorter text may have a closed form
            self._found[i] = found[0] if found else None
        return self._found[i]

    def _core(self, i: int) -> tuple[nn.Module, RecordedCall]:
        core = self.layers[i].core
        call = self.cores[i]
        assert core is not None and call is not None
        if not self.layers[i].alone:
            raise UserError(
                f"{type(core).__name__} (layer {i}) is not a map of a single sequence of tokens, "
                "so scopes heads and attention are not available; use residual or block"
            )
        _check_tokens(core, i, call)
        return core, call

    def _block(self, i: int) -> tuple[nn.Module, RecordedCall]:
        block = self.layers[i].block
        call = self.blocks[i]
        if block is None or call is None:
            raise UserError(
                f"layer {i} is not part of a list of blocks, so scopes normed, residual, "
                "block, suffix and model are not available"
            )
        _check_tokens(block, i, call)
        return block, call


def record(
    runner: ModelRunner, layers: list[Layer], inputs: RecordedCall, memory: Memory
) -> Survey:
    """Run the model on `inputs`, and on its first member unless that is all there is."""
    modules = {m: "input" for layer in layers for m in (layer.core, layer.block) if m is not None}

    def calls_in(call: RecordedCall) -> dict[nn.Module, list[RecordedCall]]:
        with torch.no_grad(), runner.ready(), capture(modules) as captured:
            runner.run(runner.trunk, call)
        found: dict[nn.Module, list[RecordedCall]] = {module: [] for module in modules}
        for module, _, value in captured:
            found[module].append(value)
        return found

    calls = calls_in(inputs)
    if inputs.single is not None:
        alone = calls_in(inputs.single)
        calls = {
            module: [replace(a, single=b) for a, b in zip(whole, alone[module], strict=False)]
            for module, whole in calls.items()
        }
    # A module that serves several layers (ALBERT) has one call per layer, in the order of layers.
    following = {module: iter(made) for module, made in calls.items()}
    cores: list[RecordedCall | None] = []
    blocks: list[RecordedCall | None] = []
    for layer in layers:
        core = layer.core
        block = layer.block
        cores.append(None if core is None else next(following[core]))
        blocks.append(None if block is None or block is core else next(following[block]))
    return Survey(
        runner=runner, layers=layers, inputs=inputs, cores=cores, blocks=blocks, memory=memory
    )


def _check_tokens(module: nn.Module, i: int, call: RecordedCall) -> None:
    shape = tuple(call.hidden.shape)
    single = (call.single or call).hidden.shape
    if len(shape) != 3:
        raise UserError(
            f"{type(module).__name__} (layer {i}) reads tokens of shape {shape}, "
            "not sequences [samples, tokens, size]"
        )
    if shape[1:] != tuple(single[1:]):
        raise UserError(
            f"{type(module).__name__} (layer {i}) concatenates its samples into shape {shape}; "
            "give one sample at a time"
        )
    if single[0] != 1:
        raise UserError(
            f"{type(module).__name__} (layer {i}) cuts a sample into {single[0]} sequences, such "
            "as windows or frames, and this scope needs a single one; use scope residual, block, "
            "suffix or model"
        )
