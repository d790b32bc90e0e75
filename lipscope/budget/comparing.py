"""Compare two runs of a model: is the difference rounding, or is one of them wrong?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope._notebook_bar import with_bar
from lipscope._types import UserError
from lipscope.budget.formats import DTYPES
from lipscope.budget.intervals import largest_ratio
from lipscope.budget.states import FALSE_ALARMS, StateBudget, state_budgets
from lipscope.budget.subject import (
    Inputs,
    Sample,
    Source,
    Subject,
    Text,
    hidden_states,
    own_attention,
    read_subject,
    with_last,
)
from lipscope.models.loading import load
from lipscope.study.frames import data_frame

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 1.15
"""How far the error of a correct run may lie from its prediction for reasons other than chance."""

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
    """Two runs, compared at every hidden state, as returned by :func:`compare_runs`.

    Attributes:
        format: The format in which the second run was made.
        states: One row per hidden state, from the embeddings to the last.
        false_alarms: Probability that a correct run has a state outside its budget.
    """

    format: str
    states: list[StateRatio]
    false_alarms: float

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
            "states": [{**state._asdict(), "inside": state.inside} for state in self.states],
        }

    def sentence(self) -> str:
        """The verdict in words."""
        bad = self.first_outside
        if bad is None:
            worst = max(self.states, key=lambda state: state.ratio / state.limit)
            return (
                f"rounding to {self.format} explains the difference at every hidden state "
                f"(largest ratio {worst.ratio:.2f} of {worst.limit:.2f}, at {worst.name})"
            )
        return (
            f"{bad.name} is outside its budget: the error is {bad.ratio:.2f} times what rounding "
            f"to {self.format} explains, and {bad.limit:.2f} times is the limit"
        )

    def __repr__(self) -> str:
        return f"RunComparison: {self.sentence()}"

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th>{text}</th>" for text in ("state", "observed", "predicted", "ratio", "limit")
        )
        lines = "".join(
            "<tr>"
            + "".join(
                f"<td>{escape(cell)}</td>"
                for cell in (
                    s.name,
                    f"{s.observed:.2e}",
                    f"{s.predicted:.2e}",
                    f"{s.ratio:.2f}",
                    f"{s.limit:.2f}",
                )
            )
            + "</tr>"
            for s in self.states
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        return f"<div><p>{escape(self.sentence())}</p>{table}</div>"


@with_bar("comparing")
def compare_runs(
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
            attention; a name or folder is loaded and runs in `format`. A safetensors file holds
            the hidden states of another engine: hidden_states.0 to hidden_states.L of shape
            [B, n, d], the last one after the final norm, and input_ids [B, n].
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
        UserError: If the two do not have the same hidden states, or for another format.

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
        >>> ls.compare_runs(right, port, torch.arange(24)).ok
        True
        >>> _ = port.layers[1].mlp.down_proj.weight.data.mul_(1.1)
        >>> ls.compare_runs(right, port, torch.arange(24)).first_outside.name
        'layer 1'
    """
    check_format(format)  # before models are loaded
    recorded = _recorded(b)
    if recorded is not None:
        ids, states = recorded
        text = ids if ids is not None else text
    reference = read_subject(a, text, inputs=inputs, head=False, length=length, samples=samples)
    if recorded is None:
        run = _runner(b, reference, format, inputs)
        name = format or _format_of(next(run.module.parameters()).dtype)
        found = [_states_of(run, row) for row in reference.sequences]
        own = run.attention
    else:
        name = format or _format_of(states[0].dtype)
        found = [[h[i : i + 1] for h in states] for i in range(len(states[0]))]
        own = reference.own
    low = replace(reference, own=own).in_dtype(DTYPES[name])
    budgets, exact = state_budgets(reference, low, probes, seed, progress=progress)
    _check_shapes(exact, found)
    rows = [
        _judge(
            i,
            budget,
            count=len(budgets),
            probes=probes,
            eps=torch.finfo(DTYPES[name]).eps,
            exact=[e[i] for e in exact],
            found=[f[i] for f in found],
        )
        for i, budget in enumerate(budgets)
    ]
    return RunComparison(format=name, states=rows, false_alarms=FALSE_ALARMS)


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
    pairs = zip(exact, found, strict=True)
    observed = sum(float((f.to(e) - e).square().sum()) for e, f in pairs)
    expected = max(budget.squared, (FLOOR * eps) ** 2 * budget.size)
    return StateRatio(
        state=i,
        name="embeddings" if i == 0 else f"layer {i - 1}",
        observed=(observed / budget.size) ** 0.5,
        predicted=(expected / budget.size) ** 0.5,
        ratio=(observed / expected) ** 0.5,
        limit=MARGIN * largest_ratio(budget.freedom, probes, 1 - FALSE_ALARMS / count) ** 0.5,
    )


def _recorded(b: Source | Path) -> tuple[Tensor | None, list[Tensor]] | None:
    """The token ids and hidden states of a file; None if b is not a file of them."""
    if not isinstance(b, str | Path) or Path(b).suffix != ".safetensors":
        return None
    from safetensors.torch import load_file

    try:
        tensors = load_file(b)
    except Exception as error:  # safetensors raises a class of its own
        raise UserError(f"cannot read {b} as safetensors ({error})") from error
    states: list[Tensor] = []
    while f"hidden_states.{len(states)}" in tensors:
        states.append(tensors[f"hidden_states.{len(states)}"])
    if not states or any(h.ndim != 3 or len(h) != len(states[0]) for h in states):
        raise UserError(
            f"{b} must hold hidden_states.0, hidden_states.1 and so on, each of shape [B, n, d]; "
            f"it holds {', '.join(sorted(tensors)[:8]) or 'nothing'}"
        )
    return tensors.get("input_ids"), states


def _runner(b: Source | Path, reference: Subject, format: str | None, inputs: Inputs) -> Subject:
    """The second model, ready to run the sequences of the first."""
    if isinstance(b, Path):
        b = str(b)
    if not isinstance(b, nn.Module):
        ids = torch.zeros(1, 1, dtype=torch.long) if inputs is None else None
        other = read_subject(b, ids, inputs=inputs, head=False, length=1, samples=1)
        return other.in_dtype(DTYPES[format or "bf16"])
    module = copy.deepcopy(load(b).trunk).eval()
    dtype = next(module.parameters()).dtype
    return replace(reference, module=module, dtype=dtype, attention=own_attention(module))


def _states_of(run: Subject, sample: Sample) -> list[Tensor]:
    with torch.no_grad(), run.ready(), hidden_states(run.module) as seen:
        output = run.run(sample)
    return with_last(seen, output)


def _format_of(dtype: torch.dtype) -> str:
    names = {d: name for name, d in DTYPES.items()}
    if dtype not in names:
        raise UserError(
            f"the run is in {str(dtype).removeprefix('torch.')}, which has no budget; "
            f"give format, one of {', '.join(DTYPES)}"
        )
    return names[dtype]


def _check_shapes(exact: list[list[Tensor]], found: list[list[Tensor]]) -> None:
    for e, f in zip(exact, found, strict=False):
        if [x.shape for x in e] != [x.shape for x in f]:
            raise UserError(
                f"the runs do not have the same hidden states: {len(e)} of shape "
                f"{tuple(e[0].shape)} against {len(f)} of shape {tuple(f[0].shape)}"
            )
    if len(exact) != len(found):
        raise UserError(
            f"the runs do not have the same sequences: {len(exact)} against {len(found)}"
        )
