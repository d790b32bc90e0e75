"""Compare two runs of a model: is the difference rounding, or is one of them wrong?

With q_k = v_k' C v_k for the covariance C of the error at a hidden state and Gaussian probes v_k,
the mean of q is tr C, the expected square of the error, and its variance is 2 tr C^2: the same as
that of the squared norm of a Gaussian error with covariance C. So the spread of q over probes also
tells how far the observed error of one correct run may lie from its expectation, and
nu = 2 mean^2 / variance are the degrees of freedom of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from scipy.special import ndtri
from torch import Tensor, nn

from lipscope._ambient import entry_point
from lipscope._display import with_bar
from lipscope._types import UserError
from lipscope.models.loading import load
from lipscope.models.model_files import on_one_line
from lipscope.probes.budget.formats import DTYPES
from lipscope.probes.budget.jobs import impossible
from lipscope.probes.budget.metrics import check_probes, degrees_of_freedom, largest_ratio
from lipscope.probes.budget.rounding import Followed, follow_run, squared_errors
from lipscope.probes.budget.subject import (
    Inputs,
    Sample,
    Source,
    Subject,
    Text,
    copied,
    hidden_states,
    last_hidden,
    own_attention,
    read_subject,
    with_last,
    with_layers,
)
from lipscope.probes.budget.tracing import batches, is_float
from lipscope.study.records import data_frame

if TYPE_CHECKING:
    import pandas as pd

FALSE_ALARMS = 0.01
"""Probability that a correct run is called wrong, over all hidden states together."""


class Tolerance(TypedDict):
    """Arguments of torch.testing.assert_close."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class StateBudget:
    """The expected squared error at a hidden state, over all sequences.

    squared: tr C, summed over sequences
    freedom: the degrees of freedom of the squared error of one run
    size:    the squared norm of the hidden state
    entries: the number of its entries
    peak:    the largest rms error of a token or of a channel, relative to that of all entries
    made:    the squared error of the run that the budget was made from, over all sequences
    """

    squared: float
    freedom: float
    size: float
    entries: int
    peak: float
    made: float


def state_budgets(
    subject: Subject,
    low: Subject,
    probes: int,
    seed: int,
    only: int | None = None,
    before_norm: bool = False,
    progress: Callable[[float, float], None] | None = None,
) -> tuple[list[StateBudget], list[list[Tensor]]]:
    """The budget of every hidden state (or of one), and the states of the reference.

    With `before_norm`, the last layer's output before the final norm is one more state at the end,
    if the model has such a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    noise: list[Tensor] = []
    states: list[list[Tensor]] = []
    errors: list[list[Tensor]] = []
    for b, sample in enumerate(subject.sequences):
        if progress is not None:
            progress(b, len(subject.sequences))
        run = follow_run(subject, low, sample)
        pairs = list(zip(run.states, run.run[1], strict=True))
        pairs = pairs if only is None else [pairs[only]]
        if before_norm and run.before is not None:
            pairs.append(run.before)
        noise.append(_noise(run, [exact for exact, _ in pairs], probes, generator))
        states.append([exact.detach() for exact, _ in pairs])
        errors.append([made.to(subject.dtype) - exact.detach() for exact, made in pairs])
    q = torch.stack(noise, dim=-1)  # [states, probes, sequences]
    budgets = [
        StateBudget(
            squared=float(q[i].mean(dim=0).sum()),
            freedom=degrees_of_freedom(q[i]),
            size=sum(float(s[i].square().sum()) for s in states),
            entries=sum(s[i].numel() for s in states),
            peak=max(_peak(e[i]) for e in errors),
            made=sum(float(e[i].square().sum()) for e in errors),
        )
        for i in range(len(q))
    ]
    return budgets, states


def state_tolerance(subject: Subject, format: str, state: int, probes: int, seed: int) -> Tolerance:
    """Tolerances within which all entries of a hidden state of a correct run lie."""
    if format not in DTYPES:
        raise UserError(
            f"tolerances exist for runs in {', '.join(DTYPES)}; {format!r} is not one of them"
        )
    dtype = DTYPES[format]
    (budget,), _ = state_budgets(subject, subject.in_dtype(dtype), probes, seed, only=state)
    rms = (budget.squared / budget.entries) ** 0.5
    # A normal error exceeds this at one of the entries with probability FALSE_ALARMS.
    quantile = -float(ndtri(FALSE_ALARMS / 2 / budget.entries))
    return {"atol": quantile * budget.peak * rms, "rtol": torch.finfo(dtype).eps}


def _noise(run: Followed, states: list[Tensor], probes: int, generator: torch.Generator) -> Tensor:
    """q of every probe at every state, [states, probes]."""
    drawn = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
        for y in states
        for _ in range(probes)
    ]
    q = []
    by_site = torch.zeros(len(states), len(run.roundings), dtype=torch.float64)
    # One backward pass serves probes of several states: a probe is zero at all states but its own.
    for batch in batches(len(drawn), [r.exact for r in run.roundings]):
        hit = sorted({row // probes for row in batch})
        v = [states[i].new_zeros(len(batch), *states[i].shape) for i in hit]
        for k, row in enumerate(batch):
            v[row // probes - hit[0]][k] = drawn[row]
        squares = squared_errors([states[i] for i in hit], v, run.roundings)[0]
        q.append(squares.sum(dim=1))
        by_site.index_add_(0, torch.tensor([row // probes for row in batch]), squares / probes)
    for y, sites in zip(states, by_site, strict=True):
        relative = float(sites.sum().to(y.device) / y.detach().square().sum())
        if not relative <= 1 and bool(sites.any()):  # NaN is not, either
            kind = str(run.run[1][0].dtype).removeprefix("torch.")
            worst = run.roundings[int(sites.nan_to_num(torch.inf).argmax())]
            value = relative**0.5
            raise UserError(impossible(kind, value, worst.name))
    return torch.cat(q).reshape(len(states), probes)


def _peak(error: Tensor) -> float:
    mean = error.square().mean()
    if not bool(mean > 0):
        return 1.0
    rows = error.square().mean(dim=-1)
    columns = error.square().mean(dim=-2)
    return float((torch.maximum(rows.max(), columns.max()) / mean).sqrt())


MARGIN = 1.15
"""How far the error of a correct run may lie from its prediction for reasons other than chance."""

USELESS = 0.5
"""Above this predicted relative error, rounding would explain anything."""

EXCESS = 10.0
"""A prediction this many times the error of a real run is wrong, and would excuse anything."""

FLOOR = 1 / 32
"""A relative error, in units of eps, that is never held against a run: sums may be reordered."""


class StateRatio(NamedTuple):
    """The error at one hidden state, relative to its norm, and whether rounding explains it.

    ratio: observed / predicted
    limit: the largest ratio that rounding explains
    """

    state: int
    name: str
    observed: float
    predicted: float
    ratio: float
    limit: float

    @property
    def inside(self) -> bool:
        # A comparison that NaN fails: a run without finite values is not inside anything.
        return self.ratio <= self.limit


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Two runs, compared at every hidden state, as returned by :func:`check_run`.

    Attributes:
        format: The format in which the second run was made.
        states: One row per hidden state, from the embeddings to the last.
        false_alarms: Probability that a correct run has a state outside its budget.
        before_norm: Whether the last state was recognised as taken before the final norm.
    """

    format: str
    states: list[StateRatio]
    false_alarms: float
    before_norm: bool = False

    @property
    def ok(self) -> bool:
        """Whether every hidden state lies within its budget."""
        return self.first_outside is None

    @property
    def first_outside(self) -> StateRatio | None:
        """The first hidden state that rounding does not explain, or None."""
        return next((state for state in self.states if not state.inside), None)

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame."""
        return data_frame(self.states, StateRatio._fields)

    def as_dict(self) -> dict[str, Any]:
        """The rows and the verdict, as plain values."""
        bad = self.first_outside
        return {
            "format": self.format,
            "ok": self.ok,
            "first_outside": None if bad is None else bad.name,
            "false_alarms": self.false_alarms,
            "before_norm": self.before_norm,
            "states": [{**state._asdict(), "inside": state.inside} for state in self.states],
        }

    def sentence(self) -> str:
        """The verdict in words."""
        bad = self.first_outside
        if bad is None:
            worst = max(self.states, key=lambda state: state.ratio / state.limit)
            found = (
                f"rounding to {self.format} explains the difference at every hidden state "
                f"(largest ratio {worst.ratio:.2f} of {worst.limit:.2f}, at {worst.name})"
            )
        else:
            found = (
                f"{bad.name} is outside its budget: the error is {bad.ratio:.2f} times what "
                f"rounding to {self.format} explains, and {bad.limit:.2f} times is the limit"
            )
        if self.before_norm:
            found += (
                "; the last state was recognised as taken before the final norm, so the norm "
                "itself is not checked"
            )
        if bad is None and self.format != "fp32":
            found += "; compare in fp32 to see smaller bugs"
        return found

    def __repr__(self) -> str:
        return f"RunComparison: {self.sentence()}"

    def _repr_html_(self) -> str:
        from lipscope.report.budgets import comparison_table
        from lipscope.report.study_table import terminal_html

        return terminal_html(comparison_table(self))


@entry_point
@with_bar("comparing")
def check_run(
    a: Source,
    b: Source | Path,
    text: Text = None,
    *,
    inputs: Inputs = None,
    format: str | None = None,
    probes: int = 8,
    length: int = 128,
    samples: int = 4,
    seed: int = 0,
    progress: Callable[[float, float], None] | None = None,
) -> RunComparison:
    """Compare a run with the model it claims to be, hidden state by hidden state.

    The hidden states of `a`, computed in float64, are the truth. The error of `b` at each of them
    is compared with the error that a correct run in `format` makes, predicted from the rounding of
    every operation. If rounding errors are independent and their effect is linear, a correct run
    has a state outside its budget with probability at most `false_alarms`, all states together.

    Args:
        a: The reference: what :func:`lipscope.load` takes, or a loaded :class:`Model`.
        b: The run to judge. A live module runs as it is, in its own dtype and with its own
            attention; one that is not of transformers runs on the token ids, and its hidden states
            are the outputs of its list of layers. A name or folder is loaded and runs in `format`.
            A file (.safetensors or .npz) holds the hidden states of another engine:
            hidden_states.0 to hidden_states.L of shape [B, n, d] and input_ids [B, n]; the last
            state is after the final norm, or before it, which is recognised.
        text: As for :func:`error_budget`; ignored if `b` is a file with input_ids.
        inputs: As for :func:`error_budget`.
        format: bf16, fp16 or fp32. Default: the dtype of `b`.
        probes: Backward passes per hidden state and sequence.
        length: Maximum number of tokens per sequence.
        samples: Number of sequences taken from a text.
        seed: Seed of the probes.
        progress: Called with the sequences done and their number. Default: a bar in notebooks,
            nothing elsewhere.

    Returns:
        The :class:`RunComparison`, with `ok` and `first_outside`.

    Raises:
        UserError: If the two do not have the same hidden states, for another format, or if the
            effect of rounding cannot be predicted.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=4)
        >>> right = LlamaModel(config).eval()
        >>> port = LlamaModel(config).eval()
        >>> _ = port.load_state_dict(right.state_dict())
        >>> port = port.bfloat16()
        >>> ls.check_run(right, port, torch.arange(24)).ok
        True
        >>> _ = port.layers[1].mlp.down_proj.weight.data.mul_(1.1)
        >>> ls.check_run(right, port, torch.arange(24)).first_outside.name
        'layer 1'
    """
    check_probes(probes, least=1)
    check_format(format)  # before models are loaded
    path = recorded_path(b)
    recorded = None if path is None else read_recorded(path)
    if recorded is not None and recorded.ids is not None:
        text = recorded.ids
    reference = read_subject(a, text, inputs=inputs, head=False, length=length, samples=samples)
    expected = [[h.shape for h in _states_of(reference, row)[0]] for row in reference.sequences]
    if not expected[0]:
        raise UserError(
            f"{reference.name} has no list of layers (nn.ModuleList, nn.Sequential), so there are "
            "no hidden states to compare; error_budget with observe=True compares the outputs"
        )
    if recorded is None:
        run = _runner(b, reference, format, inputs)
        names = {dtype: name for name, dtype in DTYPES.items()}
        name = format or names.get(run.dtype, str(run.dtype).removeprefix("torch."))
        runs = [_states_of(run, row) for row in reference.sequences]
        found = [states for states, _ in runs]
        before = not all(final for _, final in runs)
        own = run.attention
        buffers = {key: x.dtype for key, x in run.module.named_buffers() if is_float(x)}
    else:
        name = format or recorded.format
        _check_recorded(reference, recorded, expected)
        found = [[h[i : i + 1] for h in recorded.states] for i in range(len(recorded.states[0]))]
        own = reference.own
        before = True
        buffers = None
    if name not in DTYPES:
        raise UserError(
            f"the run is in {name}, which has no budget; give format, one of {', '.join(DTYPES)}"
        )
    _check_shapes(expected, found)
    low = replace(reference, own=own).in_dtype(DTYPES[name], buffers)
    budgets, exact = state_budgets(
        reference, low, probes, seed, before_norm=before, progress=progress
    )
    count = len(found[0])
    rows = [
        _judge(
            i,
            budget,
            count=count,
            probes=probes,
            eps=torch.finfo(DTYPES[name]).eps,
            exact=[e[i] for e in exact],
            found=[f[min(i, count - 1)] for f in found],
        )
        for i, budget in enumerate(budgets)
    ]
    # Of the two readings of the last state, the closer one is meant.
    early = len(rows) > count and rows[-1].ratio < rows[-2].ratio
    if early:
        rows[count - 1] = rows[-1]._replace(state=rows[-2].state, name=rows[-2].name)
        budgets[count - 1] = budgets[-1]
    for row, budget in zip(rows[:count], budgets, strict=False):
        _check_prediction(row, budget)
    return RunComparison(
        format=name, states=rows[:count], false_alarms=FALSE_ALARMS, before_norm=early
    )


def check_format(format: str | None) -> None:
    """Raise UserError if `format` is not one that a whole run can be in; None is."""
    if format is not None and format not in DTYPES:
        raise UserError(
            f"format must be one of {', '.join(DTYPES)}, got {format!r}; all other formats are for "
            "`lipscope budget`, which runs them with --observe"
        )


def _judge(
    i: int,
    budget: StateBudget,
    count: int,
    probes: int,
    eps: float,
    exact: list[Tensor],
    found: list[Tensor],
) -> StateRatio:
    name = "embeddings" if i == 0 else f"layer {i - 1}"
    pairs = zip(exact, found, strict=True)
    observed = sum(float((f.to(e) - e).square().sum()) for e, f in pairs)
    expected = max(budget.squared, (FLOOR * eps) ** 2 * budget.size)
    limit = MARGIN * largest_ratio(budget.freedom, probes, 1 - FALSE_ALARMS / count) ** 0.5
    return StateRatio(
        state=i,
        name=name,
        observed=(observed / budget.size) ** 0.5,
        predicted=(expected / budget.size) ** 0.5,
        ratio=(observed / expected) ** 0.5,
        limit=limit,
    )


def _check_prediction(row: StateRatio, budget: StateBudget) -> None:
    """Raise UserError if a verdict by this prediction would mean nothing.

    The prediction was made from a run of the reference itself in the format: its error is known.
    """
    cannot = f"the effect of rounding on {row.name} cannot be predicted"
    hint = "; compare in fp32, or on another input"
    if not row.predicted < USELESS or not math.isfinite(row.limit):
        raise UserError(f"{cannot} ({row.predicted:.2g} of its norm is no bound){hint}")
    made = (budget.made / budget.size) ** 0.5
    excessive = budget.squared > EXCESS**2 * budget.made
    if excessive or not made <= row.limit * row.predicted:
        raise UserError(
            f"{cannot} ({row.predicted:.2g} of its norm, but {made:.2g} in a run of the reference "
            f"itself){hint}"
        )


def _runner(b: Source | Path, reference: Subject, format: str | None, inputs: Inputs) -> Subject:
    """The second model, ready to run the sequences of the first."""
    if isinstance(b, Path):
        b = str(b)
    if not isinstance(b, nn.Module):
        ids = torch.zeros(1, 1, dtype=torch.long) if inputs is None else None
        other = read_subject(b, ids, inputs=inputs, head=False, length=1, samples=1)
        return other.in_dtype(DTYPES[format or "bf16"])
    if not hasattr(b, "base_model_prefix"):
        # Not a model of transformers: its layers are the members of its lists of modules.
        kinds = (x.dtype for x in b.parameters() if x.is_floating_point())
        dtype = next(kinds, torch.float32)
        run = replace(reference, module=copied(b).eval(), dtype=dtype, attention=reference.own)
    else:
        module = copied(load(b).trunk).eval()
        dtype = next(module.parameters()).dtype
        run = replace(reference, module=module, dtype=dtype, attention=own_attention(module))
    if type(run.module) is type(reference.module):
        return run
    with _errors_said(run):
        return with_layers(run)


def _states_of(run: Subject, sample: Sample) -> tuple[list[Tensor], bool]:
    """The hidden states of a run, and whether the last one is the output of the model."""
    with torch.no_grad(), run.ready(), hidden_states(run) as seen, _errors_said(run):
        output = run.run(sample)
    final = bool(seen) and last_hidden(output).shape == seen[-1].shape
    return with_last(seen, output), final


@contextmanager
def _errors_said(run: Subject) -> Iterator[None]:
    """Raise UserError with the model's own error if it does not run."""
    try:
        yield
    except Exception as error:  # each model raises its own kind of error
        kind = str(run.dtype).removeprefix("torch.")
        raise UserError(
            f"{type(run.module).__name__} does not run in {kind} on these inputs "
            f"({on_one_line(error)}); if it is not a model of transformers, {HOW}"
        ) from error


def _check_recorded(reference: Subject, run: RecordedRun, expected: list[list[torch.Size]]) -> None:
    """Raise UserError if a recorded run has other samples or other states than the reference."""
    wanted = [(len(expected), *h[1:]) for h in expected[0]]
    given = [tuple(h.shape) for h in run.states]
    if wanted != given:
        raise UserError(
            f"{run.path} does not hold the hidden states of {reference.name}: "
            f"{_listed(given)}, and {_listed(wanted)} expected; {HOW}"
        )


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    different = [str(list(shape)) for shape in dict.fromkeys(shapes)]
    return f"{len(shapes)} of shape {' and '.join(different[:3])}" if shapes else "none"


def _check_shapes(expected: list[list[torch.Size]], found: list[list[Tensor]]) -> None:
    """Raise UserError if a run has other hidden states than the reference."""
    for wanted, states in zip(expected, found, strict=True):
        given = [h.shape for h in states]
        if wanted != given:
            raise UserError(
                f"the runs do not have the same hidden states: {_listed(wanted)} against "
                f"{_listed(given)}; {HOW}"
            )


SUFFIXES = (".safetensors", ".npz", ".npy")
"""Files that hold hidden states."""

LAYOUT = "hidden_states.0 to hidden_states.L of shape [B, n, d] and input_ids [B, n]"
HOW = (
    f"save {LAYOUT}, as transformers returns them with output_hidden_states=True, "
    "with safetensors.torch.save_file or numpy.savez"
)


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The hidden states of a run.

    states: [B, n, d] each, from the embeddings to the last one
    ids:    the token ids [B, n], if the file has them
    """

    path: Path
    states: list[Tensor]
    ids: Tensor | None

    @property
    def format(self) -> str:
        """The narrowest format that holds all states without error.

        NumPy has no bf16, so a run in bf16 is often stored as float32.
        """
        for name in ("bf16", "fp16", "fp32"):
            kinds = {h.dtype for h in self.states}
            held = (torch.equal(h.to(DTYPES[name]).to(h.dtype), h) for h in self.states)
            if kinds == {DTYPES[name]} or all(held):
                return name
        return str(self.states[0].dtype).removeprefix("torch.")


def recorded_path(b: Any) -> Path | None:
    """The path of a file of hidden states; None if `b` is a model."""
    if not isinstance(b, str | Path):
        return None
    path = Path(b)
    if path.suffix in SUFFIXES:
        return path
    if path.is_file():
        raise UserError(
            f"{path} is a file, and hidden states are read from {', '.join(SUFFIXES)} files; {HOW}"
        )
    return None


def read_recorded(path: Path) -> RecordedRun:
    """The run that a file holds."""
    tensors = _tensors(path)
    states: list[Tensor] = []
    while f"hidden_states.{len(states)}" in tensors:
        states.append(tensors[f"hidden_states.{len(states)}"])
    stacked = tensors.get("hidden_states")
    if not states and stacked is not None and stacked.ndim == 4:
        states = list(stacked)
    if not states:
        raise UserError(
            f"{path} must hold {LAYOUT}; it holds {', '.join(sorted(tensors)[:8]) or 'nothing'}"
        )
    for i, h in enumerate(states):
        if h.ndim != 3 or not h.is_floating_point() or len(h) != len(states[0]):
            raise UserError(
                f"hidden_states.{i} in {path} must be floating-point numbers of shape [B, n, d] "
                f"with B = {len(states[0])}, got {_kind(h)}"
            )
    ids = tensors.get("input_ids")
    if ids is not None:
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.is_floating_point() or ids.shape != states[0].shape[:2]:
            raise UserError(
                f"input_ids in {path} must be integers of shape "
                f"{list(states[0].shape[:2])}, as the hidden states are, got {_kind(ids)}"
            )
    return RecordedRun(path=path, states=states, ids=ids)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        import numpy as np

        # Pickled objects can run code; NumPy refuses them by itself.
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"hidden_states": _from_numpy(found)}
        with found:
            return {name: _from_numpy(found[name]) for name in found.files}
    except Exception as error:  # each library and each kind of damage raises a class of its own
        remedy = "; numpy.savez writes arrays that need no pickle" if "pickle" in str(error) else ""
        raise UserError(
            f"cannot read {path} as {path.suffix.removeprefix('.')} ({on_one_line(error)}){remedy}"
        ) from error


def _from_numpy(array: Any) -> Tensor:
    # bfloat16 of ml_dtypes, as JAX has it: NumPy stores the two bytes without their meaning.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return (
            torch.from_numpy(array.view("uint16").astype("int32"))
            .to(torch.int16)
            .view(torch.bfloat16)
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
