"""Attacks on a text: replace up to k tokens to maximise a number, for instance sigma of a layer.

The target is given by two callables and the embedding matrix, so that positions and all layers
below are included. First-order scores <gradient_i, e_w - e_i> select candidates from the whole
vocabulary; each candidate is then measured. `search_until` ends any of the searches in time and
keeps the best text when stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipscope._types import UserError
from lipscope.attack.search import Search

PER_POSITION = 4
NEAREST = 3
"""Candidates measured per position and round, and vocabulary rows tried per projected token."""

BEAM = 4
"""Beam width: with 1, 14 of 100 small problems end below the best pair; with 4, 1 does."""


@dataclass(frozen=True, eq=False)
class TextTarget:
    """The number to maximise, as a function of a text of n tokens.

    measure:    token ids [B, n] -> the number for each, [B]
    slope:      token embeddings [n, d], without positions -> the number and its gradient [n, d]
    embedding:  the rows of the vocabulary, [V, d], on any device
    vocabulary: ids that may be inserted; by default all rows

    Token ids are on the CPU.
    """

    measure: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], tuple[float, Tensor]]
    embedding: Tensor
    vocabulary: Tensor | None = None

    @property
    def choices(self) -> Tensor:
        return torch.arange(len(self.embedding)) if self.vocabulary is None else self.vocabulary


@dataclass(frozen=True)
class Swapped:
    """A text after an attack: the number before and after, and how many texts were measured.

    stopped: whether the search was ended before it was done
    """

    method: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    before: float
    value: float
    measured: int
    stopped: bool = False

    @property
    def factor(self) -> float:
        return self.value / self.before if self.before > 0 else float("inf")


def guided_swaps(
    target: TextTarget,
    ids: Sequence[int],
    swaps: int = 3,
    *,
    width: int = 32,
    sweeps: int = 3,
    seed: int = 0,
    method: str = "gradient",
) -> Swapped:
    """Replace up to `swaps` tokens by a beam search over first-order candidates.

    In each turn every text of the beam gets one more replacement, from `width` candidates in all.
    Then random texts, as many as were measured so far, join the beam, and `sweeps` more rounds
    choose each replaced token again.
    """
    # The random texts matter: the gradient is that of the top singular value, and knows nothing of
    # another one that a different word would raise above it. The beam matters where tokens
    # interact: the best pair need not contain the best single token.
    text = _checked(target, ids, swaps)
    beam = text[None]
    values = target.measure(text[None])
    before = values[0].item()
    explored = _random_texts(target, text, swaps, swaps * width, seed)
    found = target.measure(explored)
    measured = 1 + len(explored)
    for turn in range(swaps * (1 + sweeps)):
        if turn == swaps:
            beam, values = _best(torch.cat([beam, explored]), torch.cat([values, found]))
        # -(-a // b) rounds up: every text of the beam gets at least one candidate.
        share = -(-width // len(beam))
        candidates = [
            _candidates(target, one, _open_places(one, text, turn, swaps), share) for one in beam
        ]
        new = torch.unique(torch.cat(candidates), dim=0)
        measured += len(new)
        beam, values = _best(torch.cat([beam, new]), torch.cat([values, target.measure(new)]))
    return swapped(method, ids, beam[0], before, values[0].item(), measured)


def _best(texts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the BEAM distinct texts of largest value, the largest first."""
    order: dict[tuple[int, ...], int] = {}
    for i in values.argsort(descending=True).tolist():
        order.setdefault(tuple(texts[i].tolist()), i)
    kept = list(order.values())[:BEAM]
    return texts[kept], values[kept]


def _open_places(one: Tensor, text: Tensor, turn: int, swaps: int) -> list[int]:
    """Where a text may change next: at a new place while swaps are left, else at a replaced one."""
    replaced = (one != text).nonzero().flatten().tolist()
    if len(replaced) < swaps:
        return [i for i in range(len(text)) if i not in replaced]
    return [replaced[turn % swaps]]


def duplicated_tokens(
    target: TextTarget, ids: Sequence[int], swaps: int = 3, *, width: int = 32
) -> Swapped:
    """Run the same search, restricted to tokens that already occur in the text."""
    own = replace(target, vocabulary=torch.unique(torch.tensor(list(ids))))
    return guided_swaps(own, ids, swaps, width=width, method="duplicates")


def random_swaps(
    target: TextTarget, ids: Sequence[int], swaps: int = 3, *, tries: int = 200, seed: int = 0
) -> Swapped:
    """Return the best of `tries` texts with `swaps` tokens replaced at random."""
    text = _checked(target, ids, swaps)
    before = target.measure(text[None])[0].item()
    texts = _random_texts(target, text, swaps, tries, seed)
    values = target.measure(texts)
    best = int(values.argmax())
    return swapped("random", ids, texts[best], before, values[best].item(), tries + 1)


def projected_swaps(
    target: TextTarget, ids: Sequence[int], swaps: int = 3, *, steps: int = 20
) -> Swapped:
    """Ascend over free embeddings, then measure the texts of the nearest rows of the vocabulary.

    Only the positions of largest gradient move, no further from 0 than the longest row. The best of
    the nearest texts is returned even if it is worse than the original.
    """
    text = _checked(target, ids, swaps)
    before = target.measure(text[None])[0].item()
    E = target.embedding[text].clone()
    value, gradient = target.slope(E)
    places = gradient.norm(dim=1).topk(swaps).indices.cpu()
    # Without a limit on the length, the embeddings could move far away from every token.
    longest = target.embedding[target.choices].norm(dim=1).max()
    stride = torch.full((1,), longest.item(), dtype=torch.float64)
    # One member: a batch of one text.
    search = Search(torch.tensor([value], dtype=torch.float64), (E[None], gradient[None]), stride)
    for _ in range(steps):
        E, gradient = (x[0] for x in search.state)
        uphill = torch.zeros_like(E)
        uphill[places] = gradient[places] / gradient[places].norm().clamp_min(1e-300)
        trial = E + search.stride.item() * uphill
        trial[places] *= longest / trial[places].norm(dim=1, keepdim=True).clamp_min(longest)
        value, slope = target.slope(trial)
        search.judge(torch.tensor([value], dtype=torch.float64), trial[None], slope[None])
    E = search.state[0][0]
    rows = target.choices
    near = (
        torch.cdist(E[places], target.embedding[rows])
        .topk(min(NEAREST, len(rows)), largest=False)
        .indices.cpu()
    )
    texts = []
    for words in product(*rows[near].tolist()):
        texts.append(text.clone())
        texts[-1][places] = torch.tensor(words)
    values = target.measure(torch.stack(texts))
    return swapped(
        "projection", ids, texts[int(values.argmax())], before, values.max().item(), 1 + len(texts)
    )


def _random_texts(target: TextTarget, text: Tensor, swaps: int, tries: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    choices = target.choices
    texts = text.repeat(tries, 1)
    for row in texts:
        places = torch.randperm(len(text), generator=generator)[:swaps]
        row[places] = choices[torch.randint(len(choices), (swaps,), generator=generator)]
    return texts


def _candidates(target: TextTarget, text: Tensor, free: list[int], width: int) -> Tensor:
    """Return texts with one token replaced at a free position: [at most width, n].

    A third each have the largest first-order score, the largest score per distance (a long jump
    leaves the range where the gradient is informative), and the largest score among the tokens of
    the text.
    """
    E = target.embedding[text]
    choices = target.choices
    _, gradient = target.slope(E)
    g = gradient[free]
    scores = g @ target.embedding[choices].T - (g * E[free]).sum(dim=1, keepdim=True)
    jumps = torch.cdist(E[free], target.embedding[choices]).clamp_min(1e-12)
    same = (choices[None] == text[free][:, None]).to(scores.device)
    foreign = ~torch.isin(choices, text)[None].to(scores.device)
    picked = [
        _largest(order.masked_fill(same, -torch.inf), -(-width // 3)).cpu()
        for order in (scores, scores / jumps, scores.masked_fill(foreign, -torch.inf))
    ]
    places, words = torch.unique(torch.cat(picked, dim=1), dim=1)
    candidates = text.repeat(len(places), 1)
    candidates[torch.arange(len(places)), torch.tensor(free)[places]] = choices[words]
    return candidates


def _largest(scores: Tensor, count: int) -> Tensor:
    """Rows and columns, [2, at most count], of the largest finite scores, few from each row."""
    per = min(scores.shape[1], PER_POSITION if len(scores) > 1 else count)
    top = scores.topk(per, dim=1)
    best = top.values.flatten().topk(min(count, top.values.numel()))
    order = best.indices[best.values > -torch.inf]
    return torch.stack([order // per, top.indices.flatten()[order]])


def swapped(
    method: str, ids: Sequence[int], text: Tensor, before: float, value: float, measured: int
) -> Swapped:
    """Return the result of a search, with the positions that differ from the original text."""
    positions = tuple(i for i, (a, b) in enumerate(zip(ids, text.tolist(), strict=True)) if a != b)
    return Swapped(
        method=method,
        ids=tuple(text.tolist()),
        positions=positions,
        before=before,
        value=value,
        measured=measured,
    )


def _checked(target: TextTarget, ids: Sequence[int], swaps: int) -> Tensor:
    size = len(target.embedding)
    if swaps < 1 or len(ids) < swaps:
        raise UserError(
            f"cannot replace {swaps} of the {len(ids)} tokens of the text; "
            f"give 1 to {len(ids)} swaps"
        )
    foreign = [i for i in (*ids, *target.choices.tolist()) if not 0 <= i < size]
    if foreign:
        raise UserError(
            f"token id {foreign[0]} has no row in the embedding of {size} tokens: text and model "
            "have different vocabularies; use the model's own tokenizer"
        )
    return torch.tensor(list(ids))


class TimeUp(BaseException):
    """Ends a search; not an Exception, so that no handler of errors inside a model swallows it."""


PRODUCTS = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.nn.functional.linear,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
}
"""Operations that may be ended. Not all of torch: leaving a torch.no_grad() is a function too."""


class Deadline(TorchFunctionMode):
    """Raises TimeUp from the first matrix product that starts after a moment.

    A single step of a search may be a solve of minutes: between steps would be too late.
    """

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and time.monotonic() > self.until:
            raise TimeUp
        return func(*args, **(kwargs or {}))


def search_until(
    search: Callable[[TextTarget, Sequence[int]], Swapped],
    target: TextTarget,
    ids: Sequence[int],
    *,
    until: float = math.inf,
    part: int = 16,
    report: Callable[[int], None] = lambda measured: None,
) -> tuple[Swapped | None, bool]:
    """Run a search for texts; at `until`, or at Ctrl-C, take the best text measured so far.

    Args:
        search: The search.
        target: What it maximises.
        ids: The text it starts from.
        until: When to stop, on the clock of `time.monotonic`.
        part: Texts measured at a time; a Ctrl-C loses at most these.
        report: Called with the number of texts measured so far.

    Returns:
        The text found, None if not even the original was measured, and whether Ctrl-C came.
    """
    original = torch.tensor(list(ids))
    before = math.nan
    measured = 0
    best: tuple[float, Tensor] = (-math.inf, original)

    def measure(texts: Tensor) -> Tensor:
        nonlocal before, measured, best
        values = []
        for some in texts.split(part):
            values.append(target.measure(some))
            top = int(values[-1].argmax())
            best = max(best, (values[-1][top].item(), some[top]), key=lambda pair: pair[0])
            if math.isnan(before) and torch.equal(some[0], original):
                before = values[-1][0].item()
            measured += len(some)
            report(measured)
        return torch.cat(values)

    interrupted = False
    try:
        with nullcontext() if until == math.inf else Deadline(until):
            return search(replace(target, measure=measure), ids), False
    except TimeUp:
        pass
    except KeyboardInterrupt:
        interrupted = True
    if math.isnan(before):
        return None, interrupted
    found = swapped("", ids, best[1], before, best[0], measured)
    return replace(found, stopped=True), interrupted
