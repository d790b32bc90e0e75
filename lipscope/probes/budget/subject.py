"""The model under test: a copy that belongs to lipscope, and the sequences it runs on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope._ambient import live_modules
from lipscope._checks import abbreviate
from lipscope._torch_internals import tree_leaves
from lipscope._types import UserError
from lipscope.models._transformers_internals import buffer_dtypes
from lipscope.models.attention import NAME, AttentionCall, listening, using_attention
from lipscope.models.capture import Captured, capture, first_tensor, has_tokens
from lipscope.models.embedded import default_text
from lipscope.models.loading import load, load_language_model
from lipscope.models.maps import Float64
from lipscope.models.model import Model
from lipscope.models.model_files import on_one_line
from lipscope.models.structure import block_calls
from lipscope.probes.budget.weights import Uses, Weight, find_uses, find_weights
from lipscope.study.reading import FixedInputs, TextColumn, content, warn_of_unknown
from lipscope.study.reading import read as read_whole

Source = str | nn.Module | Model | None
Text = str | Path | TextColumn | Sequence[Any] | Tensor | None
Inputs = Tensor | Mapping[str, Tensor] | None


@dataclass(frozen=True, eq=False)
class NamedInputs:
    """One sample of a model that does not read token ids: its arguments, by name.

    length: the number of tokens that the first block reads
    """

    arguments: dict[str, Tensor]
    length: int


Sample = Tensor | NamedInputs
"""What a module runs on at a time: token ids [1, n], or arguments by name."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that runs in `dtype`, sequence by sequence.

    module:    a copy of the model, in evaluation mode, without gradients
    sequences: the samples, one by one
    attention: the attention function it runs on, by transformers' name
    own:       the attention function of a run in low precision
    routed:    whether lipscope's attention can stand in for its own
    prefix:    what stands before the names of its parts in the model that was given
    layers:    the name of the block of every layer, in the order of calls; a shared one repeats
    attending: the layer of every attention call; -1 outside of layers
    uses:      how its parameters enter products
    model:     the loaded model, if it is one of transformers
    """

    module: nn.Module
    sequences: tuple[Sample, ...]
    dtype: torch.dtype
    attention: str
    own: str
    routed: bool
    name: str
    prefix: str = ""
    layers: tuple[str, ...] = ()
    attending: tuple[int, ...] = ()
    uses: Uses = field(default_factory=Uses)
    model: Model | None = None

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the layers, each once."""
        return [self.module.get_submodule(name) for name in dict.fromkeys(self.layers)]

    @property
    def tokens(self) -> int:
        return sum(map(length_of, self.sequences))

    def run(self, sample: Sample) -> Any:
        """Call the module on a sample, in the dtype of this subject."""
        if isinstance(sample, Tensor):
            return self.module(self.cast(sample))
        return self.module(**{name: self.cast(x) for name, x in sample.arguments.items()})

    def cast(self, x: Tensor) -> Tensor:
        """An input on the device of the module and, if it is not of integers, in its dtype."""
        device = next(self.module.parameters()).device
        return x.to(device, self.dtype if x.is_floating_point() else x.dtype)

    def layer_of(self, name: str) -> int | None:
        """The layer that a part of the module belongs to; None if it is none, or several."""
        found = [i for i, block in enumerate(self.layers) if f"{name}.".startswith(f"{block}.")]
        return found[0] if len(found) == 1 else None

    def weights(self, embeddings: bool = False) -> list[Weight]:
        """The weights that a format rounds, under the names of the model that was given."""
        if self.uses.unreadable:
            names = sorted(self.prefix + name for name in self.uses.unreadable)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{self.name} computes weights from the parameters {', '.join(names[:3])}{more}, "
                "or multiplies by them in a fused operation, so formats of weights cannot price "
                "them; give the model with the computed weights "
                "(torch.nn.utils.parametrize.remove_parametrizations), or leave these formats out"
            )
        found = find_weights(self.module, self.uses, embeddings)
        return [replace(w, name=self.prefix + w.name, layer=self.layer_of(w.name)) for w in found]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set attention and arithmetic for the runs inside."""
        with using_attention(self.module, self.attention), arithmetic(self.dtype):
            yield

    def in_dtype(
        self, dtype: torch.dtype, buffers: Mapping[str, torch.dtype] | None = None
    ) -> Subject:
        """The same model with its parameters rounded to `dtype`, as from_pretrained would load it.

        Buffers get the dtype that the architecture gives them there: the frequencies of rotary
        positions stay in float32, decay rates may not. In a plain module they are rounded like the
        parameters, as ``module.to(dtype)`` does.

        Args:
            dtype: The dtype of the parameters.
            buffers: Dtypes of buffers by name, as a live run has them.
        """
        if torch.finfo(dtype).eps <= torch.finfo(self.dtype).eps:
            coarse, exact = (str(kind).removeprefix("torch.") for kind in (dtype, self.dtype))
            raise UserError(
                f"a run in {coarse} is compared with a more accurate one, and {self.name} is "
                f"loaded in {exact}; load it in float64 (--dtype float64)"
            )
        module = copied(self.module)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        dtypes = {**buffer_dtypes(module, dtype), **(buffers or {})}
        others = dtype if self.model is None else torch.float32
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtypes.get(name, others))
        return replace(self, module=module, dtype=dtype, attention=self.own)


def read_subject(
    source: Source,
    text: Text,
    *,
    head: bool,
    length: int,
    samples: int,
    inputs: Inputs = None,
) -> Subject:
    """Copy the model and cut the text into sequences.

    Args:
        source: What :func:`lipscope.load` takes, a loaded Model, or any module that takes token
            ids [1, n].
        text: A string, a file (``Path``), a list of these, or token ids [n] or [B, n].
        head: Whether the outputs of the task head are needed; otherwise the trunk runs alone.
        length: Maximum number of tokens per sequence.
        samples: Number of sequences taken from one text.
        inputs: What the model reads in place of text, one row per sample: a tensor for its main
            argument, or tensors for all its arguments by name.
    """
    if inputs is not None and text is not None:
        raise UserError("give a text or inputs, not both")
    if isinstance(source, nn.Module) and not hasattr(source, "base_model_prefix"):
        module = source
        model = None
        own = "eager"
        routed = False
        dtype = torch.float64
        name = type(source).__name__
        encode = None
        limit = None
        rows = [] if inputs is None else _rows_of(inputs)
    else:
        model, module = _opened(source, head)
        own = own_attention(model.trunk)
        rows = []
        if inputs is not None:
            whole = read_whole(model, inputs=inputs)
            assert isinstance(whole, FixedInputs)
            rows = [NamedInputs(whole.arguments([i]), n) for i, n in enumerate(whole.lengths)]
        if not rows and model.trunk.main_input_name != "input_ids":
            raise UserError(
                f"{model.card.name} reads {model.trunk.main_input_name}, not text; give it from "
                "Python, with inputs=tensor or inputs={name: tensor, ...}"
            )
        routed = model.preflight.routed
        dtype = model.dtype
        name = model.card.name
        encode = model.encode
        limit = model.max_positions
    module = copied(module).eval().requires_grad_(False)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    if not rows:
        device = next(module.parameters()).device
        ids = read_sequences(text, encode, min(length, limit or length), samples)
        if model is not None:
            for row in ids:
                model.check_inputs({"input_ids": row})
            if model.tokenizer is not None:
                warn_of_unknown(model, [i for row in ids for i in row.flatten().tolist()])
        rows = [row.to(device) for row in ids]
    subject = Subject(
        module=module,
        sequences=tuple(rows),
        dtype=dtype,
        # Exact, differentiable twice, and linear in memory; the model's own need not be.
        attention=NAME if routed else own,
        own=own,
        routed=routed,
        name=name,
        prefix="" if model is None or head else model.prefix,
        model=model,
    )
    try:
        subject = with_layers(subject)
    except UserError:
        raise
    except Exception as error:  # each model raises its own kind of error
        raise UserError(f"{name} does not run on these inputs ({on_one_line(error)})") from error
    _check_repeatable(subject)
    return subject


def _check_repeatable(subject: Subject) -> None:
    """Raise UserError if two runs of the model differ by more than rounding."""
    with torch.no_grad(), subject.ready():
        first, again = (subject.run(subject.sequences[0]) for _ in range(2))
    if not has_tokens(first):
        return  # an output of its owner's kind, which only a metric can read
    first = first_tensor(first)
    again = first_tensor(again)
    tolerance = torch.finfo(first.dtype).eps ** 0.5 * first.norm()
    if first.shape != again.shape or bool((again - first).norm() > tolerance):
        raise UserError(
            f"{subject.name} gives another output when it runs again, so the effect of rounding "
            "cannot be seen: it draws random numbers, or changes its buffers; switch that off"
        )


def with_layers(subject: Subject) -> Subject:
    """Find the layers of a model, and how it uses its parameters, in one run."""
    sample = subject.sequences[0]
    data = [sample] if isinstance(sample, Tensor) else list(sample.arguments.values())
    run = partial(block_calls, subject.module, partial(subject.run, sample))
    with subject.ready():
        uses, (layers, attending) = find_uses(subject.module, data, run)
    names = {part: name for name, part in subject.module.named_modules()}
    return replace(
        subject,
        layers=tuple(names[block] for block in layers),
        attending=tuple(attending),
        uses=uses,
    )


def read_sequences(
    text: Text, encode: Callable[[str], list[int]] | None, length: int, samples: int
) -> list[Tensor]:
    """Token ids [1, n]: windows spread evenly over a text, one per text of a list, or rows."""
    a_text = str | Path | TextColumn
    several = isinstance(text, list | tuple) and any(isinstance(part, a_text) for part in text)
    if text is not None and not several and not isinstance(text, a_text):
        try:
            given = torch.as_tensor(text)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                "text must be a string, a file (Path), a list of these, or token ids, "
                f"got {abbreviate(text)}"
            ) from error
        if given.dtype.is_floating_point or given.ndim not in (1, 2) or not given.numel():
            raise UserError(
                f"token ids must be integers [B, n] or [n], got {given.dtype} {tuple(given.shape)}"
            )
        return [row[None].long() for row in (given if given.ndim == 2 else given[None])]
    if encode is None:
        raise UserError("this model has no tokenizer; give token ids instead of text")
    if isinstance(text, str | Path | TextColumn | None):
        ids = encode(default_text() if text is None else content(text))
        n = min(length, len(ids))
        last = len(ids) - n
        count = max(1, min(samples, len(ids) // max(n, 1)))
        starts = [round(i * last / max(count - 1, 1)) for i in range(count)]
        rows = [ids[start : start + n] for start in starts]
    else:
        rows = [encode(content(part))[:length] for part in text]
    rows = [row for row in rows if row]
    if not rows:
        raise UserError("the text has no tokens; give a longer text")
    return [torch.tensor([row]) for row in rows]


def length_of(sample: Sample) -> int:
    """The number of tokens of a sample."""
    return sample.shape[1] if isinstance(sample, Tensor) else sample.length


def _rows_of(inputs: Any) -> list[Sample]:
    """The rows of what a module of any kind reads."""
    given = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    sizes = {len(x) if isinstance(x, Tensor) and x.ndim > 1 else 0 for x in given.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise UserError(
            "inputs must be a tensor with one row per sample, or such tensors by name, "
            f"got {', '.join(f'{name}: {abbreviate(x)}' for name, x in given.items()) or 'none'}"
        )
    if not isinstance(inputs, Mapping):
        return [row[None] for row in inputs]
    return [
        NamedInputs(
            {name: x[i : i + 1] for name, x in given.items()}, next(iter(given.values())).shape[1]
        )
        for i in range(sizes.pop())
    ]


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module; what it still holds of the graph of an earlier run is cut off."""
    with live_modules:  # another thread may have set it for a measurement
        parts = tree_leaves([vars(part) for part in module.modules()])
        kept = [x for x in parts if isinstance(x, Tensor) and not x.is_leaf]
        return copy.deepcopy(module, {id(x): x.detach().clone() for x in kept})


def own_attention(module: nn.Module) -> str:
    """The attention function that a transformers model is set to use."""
    with live_modules:
        return str(getattr(module.config, "_attn_implementation", None) or "eager")


def arithmetic(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The mode in which a model computes in `dtype` from end to end."""
    return Float64() if dtype == torch.float64 else nullcontext()


@contextmanager
def hidden_states(
    subject: Subject, enter: Callable[[int | None], Any] = lambda layer: None
) -> Iterator[list[Tensor]]:
    """Collect the input of the first block and the output of every block of the runs inside.

    `enter` is called with the number of every layer that runs, and with None behind it.
    """
    states: list[Tensor] = []
    calls = count()
    depth = 0

    def visit(found: Captured) -> None:
        nonlocal depth
        if found.side == "input":
            if not states:
                states.append(found.value.hidden)
            if depth == 0:
                enter(next(calls) % len(subject.layers))
            depth += 1
            return
        states.append(first_tensor(found.value))
        depth -= 1
        if depth == 0:
            enter(None)

    with capture(dict.fromkeys(subject.blocks, "both"), visit):
        yield states


def last_hidden(output: Any) -> Tensor:
    """The tokens that a trunk returns."""
    by_name = output.get if isinstance(output, Mapping) else partial(getattr, output)
    found = by_name("last_hidden_state", None)
    found = output if found is None else found
    if not has_tokens(found):
        raise UserError(
            f"the output of the model, {type(output).__name__}, holds no floating-point numbers to "
            "compare; pass metric=function, which returns them"
        )
    return first_tensor(found)


def with_last(states: list[Tensor], output: Any) -> list[Tensor]:
    """The hidden states, the last one after the final norm, as transformers returns them."""
    last = last_hidden(output)
    return [*states[:-1], last] if states and last.shape == states[-1].shape else states


@contextmanager
def changing_cache(change: Callable[[int, str, Tensor, AttentionCall], Tensor]) -> Iterator[None]:
    """Replace the keys and values of the runs inside by change(number of the call, kind, x, call).

    kind: "key" or "value"
    """
    calls = count()

    def visit(call: AttentionCall) -> Tensor:
        number = next(calls)
        k = change(number, "key", call.k, call)
        return replace(call, k=k, v=change(number, "value", call.v, call)).output()

    with listening(visit):
        yield


def own_node(x: Tensor) -> Tensor:
    """A node of its own in the graph: its gradient does not include other uses of the tensor."""
    return (x if x.requires_grad else x.detach().requires_grad_()).view_as(x)


def _opened(source: Source, head: bool) -> tuple[Model, nn.Module]:
    """The loaded model, and the module to run: its trunk, or the whole with its head."""
    if isinstance(source, nn.Module):
        model = load(source)
        return model, source if head else model.trunk
    if not isinstance(source, Model):
        source = load_language_model(source) if head else load(source)
    if not head:
        return source, source.trunk
    if source.with_head is None:
        raise UserError(
            f"{source.card.name} was loaded without its head; pass its name, its folder or the "
            "live model with its head, or use metric='output'"
        )
    return source, source.with_head
