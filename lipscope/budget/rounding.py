"""The rounding of a low-precision run, operation by operation.

The model runs in low precision, and every operation is repeated twice. On the same rounded
arguments in high precision: the difference e is the error that this operation alone has made,
whatever it does inside (a fused kernel, a sum in float32), and exactly zero where nothing was
rounded (negation, copies, views). And on the arguments of a run that was exact from the start:
these results form the graph of the reference, in which the derivative g of any output with respect
to the result of the operation is available.

Errors of single entries are taken to be independent, of mean zero and variance e^2, those of
rounded matrices included, so that the expected square of the error of an output is
sum_s sum_i e_si^2 E g_si^2 over all sites s, with g_s = J_s' v for random v of identity covariance.
The errors of a parameter vector may have one sign (weights of a norm that all round to 1); a budget
adds E <g_s, e_s>^2 for them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipscope._torch_internals import tree_leaves, tree_map
from lipscope.budget.probing import gradients
from lipscope.budget.subject import (
    Sample,
    Subject,
    arithmetic,
    blocks,
    hidden_states,
    layer_of,
    with_last,
)
from lipscope.models.plug import NAME, AttentionCall, listening, plugged
from lipscope.models.running import hooked

IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
WEIGHT = "weight"
"""The kind of the error that rounding the parameters makes."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """A tensor of the reference, and the error that low precision makes there.

    kind: the name of the operation, or "weight" for a parameter
    """

    kind: str
    layer: int | None
    exact: Tensor
    error: Tensor

    @property
    def aligned(self) -> bool:
        """Whether the errors of the entries may have a common sign.

        The weights of a norm lie close to 1 and all round to 1. Matrices have entries of all sizes.
        """
        return self.kind == WEIGHT and self.exact.ndim == 1


class RoundingTrace(TorchFunctionMode):
    """Follow a low-precision run by a reference in `high`, and note the error of each operation."""

    def __init__(self, low: torch.dtype, high: torch.dtype) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.noted: list[Rounding] = []
        self.layer: int | None = None
        self._paused = False
        # By id; the tensor itself is kept, so that its id is not given to another one.
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def roundings(self) -> list[Rounding]:
        """What was noted, without the operations that happened to be exact."""
        if not self.noted:
            return []
        # All at once: one by one, each would wait for the device.
        made = torch.stack([r.error.any() for r in self.noted]).tolist()
        return [r for r, rounded in zip(self.noted, made, strict=True) if rounded]

    def pair(self, low: Tensor, exact: Tensor) -> None:
        """Let `exact` stand for `low` in the reference."""
        self._pairs[id(low)] = low, exact

    def exact(self, low: Tensor) -> Tensor:
        """The tensor of the reference that belongs to a tensor of the low-precision run."""
        pair = self._pairs.get(id(low))
        return low.to(self.high) if pair is None else pair[1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        return self.follow(func, tuple(args), dict(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let functions pass, so that several of them can be followed as one operation."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
    ) -> Any:
        """Run an operation in low precision, and in high precision on both kinds of arguments."""
        given = tree_leaves((args, kwargs))
        name = name or str(getattr(func, "__name__", type(func).__name__))
        in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        local = self._raised((args, kwargs), clone=in_place) if in_place else None
        low = func(*args, **kwargs)
        changed = args[0] if in_place else low
        results = [x for x in tree_leaves(changed) if _is_float(x)]
        if not any(_is_float(x) for x in given) or not results:
            return low
        if not in_place and all(any(r is x for x in given) for r in results):
            return low  # the operation returned its argument
        if func is nn.functional.embedding:
            self._note_rows(low, *args[:2])
            return low
        noted = [r.dtype.itemsize <= self.low.itemsize for r in results]
        if not in_place:
            # Views have no error, and neither have results wider than the format's: intermediate
            # values that it does not round.
            stored = {_storage(x) for x in given if _is_float(x)}
            noted = [n and _storage(r) not in stored for n, r in zip(noted, results, strict=True)]
        exact_args = tree_map(lambda x: self.exact(x) if _is_float(x) else x, (args, kwargs))
        if in_place:
            # Into a copy: what was noted about the tensor before the change must stay as it is.
            exact_args = ((exact_args[0][0].clone(), *exact_args[0][1:]), exact_args[1])
        unrounded: Any = None
        with arithmetic(self.high):
            if any(noted):
                local = local or self._raised((args, kwargs))
                with torch.no_grad():
                    unrounded = func(*local[0], **local[1])
            exact = func(*exact_args[0], **exact_args[1])
        if in_place:
            unrounded, exact = local[0][0] if local else None, exact_args[0][0]
        exacts = [x for x in tree_leaves(exact) if _is_float(x)]
        befores = [x for x in tree_leaves(unrounded) if _is_float(x)] if any(noted) else exacts
        for result, before, reference, wanted in zip(results, befores, exacts, noted, strict=True):
            self._note(name, result, before if wanted else None, reference)
        return low

    def _note(self, name: str, low: Tensor, unrounded: Tensor | None, exact: Tensor) -> None:
        """Pair a result with the reference, and note its error if the result was rounded."""
        if unrounded is not None:
            error = low.detach().to(self.high) - unrounded.to(self.high)
            # Infinite entries are masks; they are equal, or the run is lost anyway.
            error = torch.where(error.isfinite(), error, 0)
            exact = exact if exact.requires_grad else exact.detach().requires_grad_()
            self.noted.append(Rounding(name, self.layer, exact, error))
        self.pair(low, exact)

    def _note_rows(self, low: Tensor, ids: Tensor, table: Tensor) -> None:
        """Rows of an embedding: only those in use are parameters, and each is rounded once."""
        used, places = ids.unique(return_inverse=True)
        rows = self.exact(table).detach()[used].requires_grad_()
        error = table.detach()[used].to(self.high) - rows.detach()
        self.noted.append(Rounding(WEIGHT, self.layer, rows, error))
        self.pair(low, rows[places])

    def _raised(self, tree: Any, clone: bool = False) -> Any:
        """The arguments in high precision, as the low-precision run has them."""

        def raised(x: Any) -> Any:
            if not _is_float(x):
                return x
            return x.detach().to(self.high, copy=clone)

        return tree_map(raised, tree)


@dataclass(frozen=True, eq=False)
class Followed:
    """A low-precision run of one sequence next to its reference.

    output: the output of the model in the reference
    states: the hidden states of the reference, the last one after the final norm
    run:    the output and the hidden states of the low-precision run
    """

    output: Any
    states: list[Tensor]
    run: tuple[Any, list[Tensor]]
    roundings: list[Rounding]


def follow_run(reference: Subject, low: Subject, sample: Sample) -> Followed:
    """Run a sample in low precision and follow it by the reference."""
    trace = RoundingTrace(low.dtype, reference.dtype)
    pairs = zip(low.module.named_parameters(), reference.module.named_parameters(), strict=True)
    for (name, rounded), (_, parameter) in pairs:
        exact = parameter.detach().requires_grad_()
        trace.pair(rounded, exact)
        error = rounded.detach().to(reference.dtype) - exact.detach()
        trace.noted.append(Rounding(WEIGHT, layer_of(name), exact, error))
    sample = _rounded_inputs(trace, low, sample)
    with (
        plugged(low.module, low.attention),
        _marking(trace, low.module),
        hidden_states(low.module) as seen,
        _attention_as_one(trace) if low.attention == NAME else nullcontext(),
        torch.enable_grad(),
        trace,
    ):
        output = low.run(sample)
    states = with_last(seen, output)
    return Followed(
        output=tree_map(lambda x: trace.exact(x) if _is_float(x) else x, output),
        states=[trace.exact(h) for h in states],
        run=(output, [h.detach() for h in states]),
        roundings=trace.roundings(),
    )


def _rounded_inputs(trace: RoundingTrace, low: Subject, sample: Sample) -> Sample:
    """The sample as the low-precision run reads it; images and sounds are rounded on the way."""

    def rounded(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        exact, given = x.to(trace.high).requires_grad_(), low.cast(x)
        trace.pair(given, exact)
        error = given.to(trace.high) - exact.detach()
        trace.noted.append(Rounding("input", None, exact, error))
        return given

    if isinstance(sample, Tensor):
        return rounded(sample)
    return replace(sample, arguments={k: rounded(x) for k, x in sample.arguments.items()})


@contextmanager
def _marking(trace: RoundingTrace, module: nn.Module) -> Iterator[None]:
    """Tell the trace which layer is running."""

    def mark(layer: int | None, *call: Any) -> None:
        trace.layer = layer

    with ExitStack() as stack:
        for name, part in blocks(module).items():
            stack.enter_context(hooked([part], partial(mark, layer_of(name)), partial(mark, None)))
        yield


@contextmanager
def _attention_as_one(trace: RoundingTrace) -> Iterator[None]:
    """Follow lipscope's attention as a single operation, its inner rounding included."""

    def attend_once(call: AttentionCall) -> Tensor:
        def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return replace(call, q=q, k=k, v=v).output()

        with trace.paused():
            return trace.follow(output, (call.q, call.k, call.v), {}, name="attend")

    with listening(attend_once):
        yield


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def squared_errors(
    outputs: Sequence[Tensor],
    probes: Sequence[Tensor],
    roundings: Sequence[Rounding],
    aligned: bool = False,
) -> tuple[Tensor, Tensor]:
    """sum_i g_i^2 e_i^2 and <g, e> of every rounding, [K, roundings] on the CPU.

    The first is the expected square of <v, dy> if rounding were repeated at random; the second is
    the share of this very run in <v, dy>, to first order. Both are zero where y is not hit.

    Args:
        outputs: Tensors y_o of the graph of the reference.
        probes: v_o [K, *y_o.shape]; a probe is the v_o of all outputs together.
        roundings: What was rounded.
        aligned: Whether to add up the errors of a parameter vector before they are squared, which
            is right on average even if they have a common sign, but takes more probes.
    """
    found = gradients(outputs, probes, [r.exact for r in roundings])
    none = probes[0].new_zeros(len(probes[0]))
    squares, sums = [], []
    for r, g in zip(roundings, found, strict=True):
        product = none[:, None] if g is None else (g * r.error).flatten(1)
        sums.append(product.sum(dim=1))
        together = aligned and r.aligned
        squares.append(sums[-1].square() if together else product.square().sum(dim=1))
    # One transfer for all of them: each one would wait for the device.
    both = torch.stack([torch.stack(squares, dim=1), torch.stack(sums, dim=1)]).double().cpu()
    return both[0], both[1]
