"""The rounding of a low-precision run, operation by operation.

The model runs in low precision, and every operation is repeated twice. On the same rounded
arguments in high precision: the difference e is the error that this operation alone has made,
whatever it does inside (a fused kernel, a sum in float32), and exactly zero where nothing was
rounded (negation, copies, views). And on the arguments of a run that was exact from the start:
these results form the graph of the reference, in which the derivative g of any output with respect
to the result of the operation is available.

Errors of single entries, also of rounded matrices, are taken to be independent, of mean zero and
variance e^2, so that the expected square of the error of an output is
sum_s sum_i e_si^2 E g_si^2 over all sites s, with g_s = J_s' v for random v of identity covariance.
The errors of a parameter vector may have one sign (weights of a norm that all round to 1); a budget
adds E <g_s, e_s>^2 for them instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipscope._torch_internals import tree_map
from lipscope._types import UserError
from lipscope.models.attention import NAME, AttentionCall, listening, using_attention
from lipscope.models.maps import CASTS
from lipscope.models.model_files import on_one_line
from lipscope.probes.budget.subject import (
    Sample,
    Subject,
    arithmetic,
    hidden_states,
    with_last,
)
from lipscope.probes.budget.tracing import (
    DETACHING,
    RESIZING,
    WITHOUT_VALUES,
    floats_of,
    gradients,
    is_float,
    overwritten,
    part_of,
    storage_of,
    writes_argument,
)

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
    def name(self) -> str:
        """The name of the site: all operations of a kind in a layer are one."""
        return f"{'other' if self.layer is None else f'layer {self.layer}'} {self.kind}"


class RoundingTrace(TorchFunctionMode):
    """Follow a low-precision run by a reference in `high`, and note the error of each operation."""

    def __init__(self, low: torch.dtype, high: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self.high = high
        self.noted: list[Rounding] = []
        self.layer: int | None = None
        self._paused = False
        # By memory, then by the part of it that a tensor shows, whichever object it is. The tensor
        # is kept, so that its memory is not given to another one.
        self._pairs: dict[int, dict[Any, tuple[Tensor, Tensor]]] = {}

    def roundings(self) -> list[Rounding]:
        """What was noted, without the operations that happened to be exact."""
        if not self.noted:
            return []
        # All at once: one by one, each would wait for the device.
        made = torch.stack([r.error.any() for r in self.noted]).tolist()
        return [r for r, rounded in zip(self.noted, made, strict=True) if rounded]

    def pair(self, low: Tensor, exact: Tensor) -> None:
        """Let `exact` stand for `low` in the reference."""
        self._pairs.setdefault(storage_of(low), {})[part_of(low)] = low, exact

    def exact(self, low: Tensor) -> Tensor:
        """The tensor of the reference that belongs to a tensor of the low-precision run."""
        found = self._pairs.get(storage_of(low), {}).get(part_of(low))
        if found is None:
            # Kept, because a view of it may be written into later.
            found = low, self._raised(low)
            self.pair(*found)
        return found[1]

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
        name = name or str(getattr(func, "__name__", type(func).__name__))
        if func in DETACHING:
            return func(*args, **kwargs)
        given = floats_of((args, kwargs))
        out = {"out": kwargs.pop("out")} if kwargs.get("out") is not None else {}
        in_place = writes_argument(func, name, args, kwargs)
        # Before the change: the error is that of what is written, given what was there.
        local = self._raised_all((args, kwargs)) if in_place else None
        resized = self.exact(args[0]).reshape(-1) if name in RESIZING else None
        if resized is not None:
            # Its memory may be another one afterwards, and the old one given to other tensors.
            del self._pairs[storage_of(args[0])][part_of(args[0])]
        versions = [x._version for x in given]
        low = func(*args, **kwargs, **out)
        changed = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        changed = list({id(x): x for x in changed}.values())
        if changed and not in_place and not out:
            raise UserError(
                f"the operation {name} changes one of its arguments, which a budget of the whole "
                "run cannot follow; use a version of it that returns a new tensor"
            )
        results = floats_of(out) or changed or floats_of(low)
        # Errors also pass where the model asks for no gradients.
        with torch.enable_grad():
            if resized is not None:
                # Behind its old entries a tensor shows memory that was never written.
                entries = torch.cat([resized, self._raised(low).flatten()[resized.numel() :]])
                self._rewrite(low, entries[: low.numel()].view(low.shape))
            elif WITHOUT_VALUES.fullmatch(name):
                for x in changed:
                    self._rewrite(x, self._raised(x))
            elif not given:
                self._note_constants(name, func, args, kwargs, results)
            elif changed or not all(any(r is x for x in given) for r in results):
                into = [] if out else changed
                self._refer(name, func, (args, kwargs), results, into, bool(changed), local)
        return low

    def _refer(
        self,
        name: str,
        func: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        results: list[Tensor],
        into: list[Tensor],
        written: bool,
        local: Any,
    ) -> None:
        """Repeat an operation in high precision, and note what its low precision adds.

        Args:
            name: The name of the operation.
            func: The function.
            given: Its arguments and keyword arguments, without out.
            results: The tensors that hold the results of the low-precision run.
            into: The arguments that the function changes.
            written: Whether the results lie in memory that was there before.
            local: The arguments in high precision, where they had to be copied before the change.
        """
        args, kwargs = given
        if func is nn.functional.embedding:
            ids, table = (*args, *(kwargs[key] for key in ("input", "weight") if key in kwargs))[:2]
            if self.exact(table).is_leaf:
                self._note_rows(results[0], ids, table)
                return
        noted = [self._rounds(r) for r in results]
        if not written:
            # Views have no error.
            stored = {storage_of(x) for x in floats_of(given)}
            noted = [n and storage_of(r) not in stored for n, r in zip(noted, results, strict=True)]
        # Into copies: what was noted about a tensor before it changes must stay as it is.
        copies = {id(x): self.exact(x).clone() for x in into}
        exact_args, exact_kwargs = tree_map(
            lambda x: copies.get(id(x), self.exact(x)) if is_float(x) else x, given
        )
        with arithmetic(self.high):
            repeat = FIXED_NORMS.get(func, func)
            exacts = floats_of(repeat(*exact_args, **exact_kwargs))
            befores = exacts
            if any(noted):
                local = local or self._raised_all(given)
                with torch.no_grad():
                    befores = floats_of(func(*local[0], **local[1]))
        if into:
            exacts = befores = list(copies.values())
            if any(noted):
                raised = dict(zip(map(id, floats_of(given)), floats_of(local), strict=True))
                befores = [raised[id(x)] for x in into]
        for result, before, exact, wanted in zip(results, befores, exacts, noted, strict=True):
            self._note(name, result, before if wanted else None, exact)
            if written:
                self._rewrite(result, self.exact(result))

    def _rewrite(self, low: Tensor, exact: Tensor) -> None:
        """Pair a tensor that was written, and every tensor that sees the change in its memory."""
        self.pair(low, exact)
        for other, before in list(self._pairs[storage_of(low)].values()):
            if part_of(other) != part_of(low):
                self.pair(other, overwritten(other, before, low, exact))

    def _rounds(self, low: Tensor) -> bool:
        """Whether the format rounds this result; wider ones are intermediate values to it."""
        return low.dtype.to_real().itemsize <= self.low.itemsize

    def _note(self, name: str, low: Tensor, unrounded: Tensor | None, exact: Tensor) -> None:
        """Pair a result with the reference, and note its error if the result was rounded."""
        if unrounded is not None:
            error = self._raised(low)
            error = error - unrounded.to(error.dtype)
            # Infinite entries are masks; they are equal, or the run is lost anyway.
            error = torch.where(error.isfinite(), error, 0)
            # A node of its own: a cast that rounds is nothing in the reference, where its argument,
            # not rounded, may be used elsewhere.
            exact = exact.view_as(exact) if exact.requires_grad else exact.detach()
            exact.requires_grad_()
            self.noted.append(Rounding(name, self.layer, exact, error))
        self.pair(low, exact)

    def _note_constants(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
    ) -> None:
        """Note the rounding of numbers that are written into a new tensor: 1/3, position 1001."""
        if not any(self._rounds(r) for r in results):
            return
        wide = tree_map(
            lambda x: self.high if isinstance(x, torch.dtype) and x.is_floating_point else x,
            (args, kwargs),
        )
        exact = args[0].to(self.high) if func in CASTS else func(*wide[0], **wide[1])
        for result, reference in zip(results, floats_of(exact), strict=True):
            if self._rounds(result) and bool((result.to(reference.dtype) != reference).any()):
                self._note(name, result, reference, reference)

    def note_stored(
        self, low: Tensor, exact: Tensor, layer: int | None, kind: str = WEIGHT
    ) -> None:
        """Pair a parameter, buffer or input with that of the reference, and note its rounding."""
        exact = exact.detach().requires_grad_()
        self.pair(low, exact)
        if self._rounds(low):
            error = self._raised(low) - exact.detach()
            self.noted.append(Rounding(kind, layer, exact, error))

    def _note_rows(self, low: Tensor, ids: Tensor, table: Tensor) -> None:
        """Rows of an embedding: only those in use are parameters, and each is rounded once."""
        used, places = ids.unique(return_inverse=True)
        rows = self.exact(table).detach()[used].requires_grad_()
        error = table.detach()[used].to(self.high) - rows.detach()
        self.noted.append(Rounding(WEIGHT, self.layer, rows, error))
        self.pair(low, rows[places])

    def _raised(self, low: Tensor) -> Tensor:
        """A copy of the values of the low-precision run, in high precision."""
        high = self.high.to_complex() if low.is_complex() else self.high
        return low.detach().to(high, copy=True)

    def _raised_all(self, tree: Any) -> Any:
        """Arguments as the low-precision run has them, in high precision."""
        made: dict[int, Tensor] = {}

        def raised(x: Any) -> Any:
            if not is_float(x):
                return x
            if id(x) not in made:
                made[id(x)] = self._raised(x)
            return made[id(x)]

        return tree_map(raised, tree)


@dataclass(frozen=True, eq=False)
class Followed:
    """A low-precision run of one sequence next to its reference.

    output: the output of the model in the reference
    states: the hidden states of the reference, the last one after the final norm
    run:    the output and the hidden states of the low-precision run
    before: the output of the last layer before the final norm, in the reference and in the
            low-precision run; None if it is the last state itself
    """

    output: Any
    states: list[Tensor]
    run: tuple[Any, list[Tensor]]
    roundings: list[Rounding]
    before: tuple[Tensor, Tensor] | None = None


def follow_run(reference: Subject, low: Subject, sample: Sample) -> Followed:
    """Run a sample in low precision and follow it by the reference."""
    trace = RoundingTrace(low.dtype, reference.dtype)
    pairs = zip(_tensors(low), _tensors(reference), strict=True)
    for (name, rounded), (_, stored) in pairs:
        trace.note_stored(rounded, stored, reference.layer_of(name))
    inputs = {"": sample} if isinstance(sample, Tensor) else sample.arguments
    given = {name: low.cast(x) for name, x in inputs.items()}
    for name, x in inputs.items():
        if x.is_floating_point():  # images and sounds are rounded on the way
            trace.note_stored(given[name], x.to(trace.high), None, kind="input")
    sample = given[""] if isinstance(sample, Tensor) else replace(sample, arguments=given)
    with (
        using_attention(low.module, low.attention),
        hidden_states(low, partial(setattr, trace, "layer")) as seen,
        _attention_as_one(trace) if low.attention == NAME else nullcontext(),
        torch.enable_grad(),
        trace,
    ):
        try:
            output = low.run(sample)
        except RuntimeError:
            try:
                with trace.paused():
                    low.run(sample)
            except RuntimeError as error:
                kind = str(low.dtype).removeprefix("torch.")
                raise UserError(
                    f"{low.name} does not run in {kind} ({on_one_line(error)})"
                ) from error
            raise  # it runs, but not when it is followed
    states = with_last(seen, output)
    return Followed(
        output=tree_map(lambda x: trace.exact(x) if is_float(x) else x, output),
        states=[trace.exact(h) for h in states],
        run=(output, [h.detach() for h in states]),
        # A run without any error has a site as well.
        roundings=trace.roundings() or trace.noted[:1],
        before=(
            None
            if not seen or states[-1] is seen[-1]
            else (trace.exact(seen[-1]), seen[-1].detach())
        ),
    )


@contextmanager
def _attention_as_one(trace: RoundingTrace) -> Iterator[None]:
    """Follow lipscope's attention as a single operation, its inner rounding included."""

    def attend_once(call: AttentionCall) -> Tensor:
        def output(
            q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
        ) -> Tensor:
            return replace(call, q=q, k=k, v=v, mask=mask, sinks=sinks).output()

        with trace.paused():
            arguments = (call.q, call.k, call.v, call.mask, call.sinks)
            return trace.follow(output, arguments, {}, name="attend")

    with listening(attend_once):
        yield


def _tensors(subject: Subject) -> list[tuple[str, Tensor]]:
    """Parameters and buffers in floating point, by name."""
    tensors = [*subject.module.named_parameters(), *subject.module.named_buffers()]
    return [(name, x) for name, x in tensors if is_float(x)]


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
    squares = []
    sums = []
    for r, g in zip(roundings, found, strict=True):
        product = none[:, None] if g is None else _parts(g) * _parts(r.error[None])
        sums.append(product.sum(dim=1))
        # The weights of a norm lie close to 1 and may all round to 1, with one sign. Matrices have
        # entries of all sizes.
        together = aligned and r.kind == WEIGHT and r.exact.ndim == 1
        squares.append(sums[-1].square() if together else product.square().sum(dim=1))
    # One transfer for all of them: each one would wait for the device.
    both = torch.stack([torch.stack(squares, dim=1), torch.stack(sums, dim=1)]).double().cpu()
    return both[0], both[1]


def _differentiable(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of torch that has derivatives by its running mean and variance as well.

    torch's own functions have none, and buffers are rounded like parameters.
    """
    signature = inspect.signature(norm)

    def normalise(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        x, mean, var, weight, bias, of_input, _, eps = given.arguments.values()
        if of_input or mean is None:
            return norm(*args, **kwargs)
        shape = (1, -1, *[1] * (x.ndim - 2))
        y = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
        y = y if weight is None else y * weight.view(shape)
        return y if bias is None else y + bias.view(shape)

    return normalise


FIXED_NORMS = {
    norm: _differentiable(norm) for norm in (nn.functional.batch_norm, nn.functional.instance_norm)
}
"""Norms whose statistics may be buffers, and functions of the same arguments to repeat them."""


def _parts(x: Tensor) -> Tensor:
    """Tensors [K, ...] as [K, numbers]; a complex entry is two numbers."""
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(len(x), -1)
