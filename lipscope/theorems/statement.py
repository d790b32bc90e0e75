"""What a theorem is in code: a formula with norm, domain, source, and hypotheses on the layer.

Most hypotheses are about which tokens attend to which, the `Visibility` of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope._types import Domain, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2, Dot
from lipscope.fused.pattern import Pattern
from lipscope.theorems.heads import once, rope_stretch

Check = Callable[[SelfAttention, Domain], bool]
Kinds = type[Domain] | tuple[type[Domain], ...]


@dataclass(frozen=True)
class Hypothesis:
    """A condition in words, and the function that checks it."""

    says: str
    holds: Check


@dataclass(frozen=True)
class Bound:
    """One theorem about self-attention layers, an entry of `REGISTRY`.

    Attributes:
        name: Name of the theorem.
        kind: "upper", at least the constant at every input of the domain, or "lower", at most the
            constant of the domain.
        norm: "2", "inf" (largest coordinate), "inf2" (largest token) or "W2" (measures,
            Wasserstein).
        domain: Kind of domain it applies to, `Point`, `Ball`, `Around` or `Everywhere`, or a tuple
            of several kinds, the smaller set first.
        hypotheses: Conditions on layer and domain, each with its check.
        cite: Key of the source in `docs/references.bib`, or "lipscope".
        where: Place in the source, or page with the proof.
        fn: The value, for a layer in float64 that satisfies the hypotheses.
        witness: For a lower bound, an input at which the constant is at least the value.
        confidence: 1, or less if the value relies on a randomised solver.

    Example:
        >>> import lipscope as ls
        >>> compact = next(b for b in ls.theorems.REGISTRY if b.name == "compact")
        >>> compact.kind, compact.domain.__name__
        ('upper', 'Ball')
    """

    name: str
    kind: str
    norm: str
    domain: Kinds
    hypotheses: tuple[Hypothesis, ...]
    cite: str
    where: str
    fn: Callable[[SelfAttention, Domain], float]
    witness: Callable[[SelfAttention, Domain], Tensor] | None = None
    confidence: float = 1.0


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which tokens attend to which among n tokens, with all masks of a layer combined."""

    n: int
    causal: bool
    window: int | None
    mask: Tensor | None
    padding: Tensor | None
    device: torch.device

    @cached_property
    def order(self) -> str | None:
        """ "full" or "causal" if that describes the masks completely, else None.

        Long sequences then need no n x n table.
        """
        if self.mask is None and self.window is None and self.padding is None:
            return "causal" if self.causal else "full"
        whole = torch.ones_like(self.seen)
        if self.additive is not None:
            return None
        if torch.equal(self.seen, whole):
            return "full"
        return "causal" if torch.equal(self.seen, whole.tril()) else None

    @property
    def additive(self) -> Tensor | None:
        """The mask if it does more than hide keys; a constant shift of a row changes nothing."""
        return self.mask if bool((self.spread > 0).any()) else None

    @cached_property
    def seen(self) -> Tensor:
        """[n, n] boolean: i attends to j."""
        mask = self.mask
        boolean = mask if mask is None or mask.dtype == torch.bool else mask > -math.inf
        pattern = Pattern(
            causal=self.causal,
            window=self.window,
            mask=None if boolean is None else boolean[None],
            queries=self.padding,
            keys=self.padding,
        )
        seen = pattern.visible(self.n, self.n, self.device)
        if seen is None:
            seen = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        return seen.reshape(seen.shape[-2:]).expand(self.n, self.n)

    @cached_property
    def counts(self) -> Tensor:
        """Number of keys that each query sees, [n]."""
        if self.order is None:
            return self.seen.sum(dim=1)
        if self.order == "causal":
            return torch.arange(1, self.n + 1, device=self.device)
        return torch.full((self.n,), self.n, device=self.device)

    @cached_property
    def most_keys(self) -> int:
        """Largest number of keys that a query sees."""
        return self.n if self.order is not None else int(self.counts.max())

    @cached_property
    def others(self) -> int:
        """Largest number of other queries that see a key."""
        return self.n - 1 if self.order is not None else len(self.most_seen()[1])

    @cached_property
    def viewers(self) -> int:
        """Largest number of queries that see a key."""
        return self.n if self.order is not None else int(self.seen.sum(dim=0).max())

    @cached_property
    def overlap(self) -> float:
        """1 if queries with a common key see each other, 2 if one sees the other, else infinity."""
        if self.order is not None:
            return 1 if self.order == "full" else 2
        common = self.seen.double() @ self.seen.double().T > 0
        if bool(self.seen[common].all()):
            return 1
        return 2 if bool((self.seen | self.seen.T)[common].all()) else math.inf

    @property
    def ordered(self) -> bool:
        """Whether of the queries that see a key each sees all before it, from that key on."""
        # True under a causal mask, also with a window and padding; not under every mask with
        # `overlap` 2, where queries may see each other in circles.
        return self.order == "causal" or (self.causal and self.mask is None)

    @cached_property
    def spread(self) -> Tensor:
        """The largest difference of additive mask entries within each row, [n]."""
        mask = self.mask
        if mask is None or mask.dtype == torch.bool:
            return torch.zeros(self.n, dtype=torch.float64, device=self.device)
        high = torch.where(self.seen, mask, -math.inf).amax(1)
        low = torch.where(self.seen, mask, math.inf).amin(1)
        return torch.where(self.seen.any(1), high - low, 0.0).double()

    def largest_column(self, weights: Tensor) -> float:
        """max_j of the sum of weights [n] over the queries that see j."""
        if self.order is not None:
            return weights.sum().item()
        return (self.seen * weights[:, None]).sum(dim=0).max().item()

    def most_seen(self) -> tuple[int, Tensor]:
        """Return the token that most others see, and how many further keys each of those sees."""
        if self.order is not None:
            return 0, self.counts[1:] - 1
        itself = torch.eye(self.n, dtype=torch.bool, device=self.device)
        special = int((self.seen & ~itself).sum(dim=0).argmax())
        rows = self.seen[:, special].clone()
        rows[special] = False
        return special, self.counts[rows] - 1


@once
def visibility(f: SelfAttention, n: int) -> Visibility:
    """Return which of n tokens attend to which, after `check_masks`."""
    check_masks(f, n)
    return Visibility(
        n=n,
        causal=f.causal,
        window=f.window,
        mask=f.mask,
        padding=f.padding,
        device=f.Q.device,
    )


def check_masks(f: SelfAttention, n: int) -> None:
    """Raise unless the mask and padding of f are for n tokens."""
    for name, given in (("mask", f.mask), ("padding", f.padding)):
        if given is not None and tuple(given.shape) != ((n, n) if name == "mask" else (n,)):
            raise UserError(
                f"the domain has n={n} tokens and the layer's {name} has shape "
                f"{tuple(given.shape)}; they must agree"
            )


def _nonzero(bias: Tensor | None) -> bool:
    return bias is not None and bool((bias != 0).any())


DOT = Hypothesis("the scores are dot products (kernel Dot)", lambda f, _: isinstance(f.kernel, Dot))
DISTANCE = Hypothesis(
    "the scores are minus squared distances (kernel L2, a scale above 0)",
    lambda f, _: isinstance(f.kernel, L2) and (f.kernel.scale is None or f.kernel.scale > 0),
)
PLAIN_SCORES = Hypothesis(
    "the softmax is plain: no softcap, no sinks",
    lambda f, _: f.kernel.softcap is None and f.kernel.sinks is None,
)
SINKS_UNBIASED = Hypothesis(
    "keys and values have no bias where there are sinks",
    lambda f, _: f.kernel.sinks is None or not any(_nonzero(b) for b in (f.biases or ())[1:]),
)
NO_ROPE = Hypothesis(
    "queries and keys are not rotated (no rope)",
    lambda f, _: getattr(f.kernel, "rope", None) is None,
)
ROTATION = Hypothesis(
    "rope, if any, rotates: its tables repeat the same angles in both halves",
    lambda f, _: rope_stretch(f) is not None,
)
NO_QUERY_BIAS = Hypothesis(
    "the queries have no bias", lambda f, _: not _nonzero((f.biases or (None,))[0])
)
NO_ADDITIVE = Hypothesis(
    "the mask, if any, only hides keys", lambda f, d: visibility(f, d.n).additive is None
)
FULL_OR_CAUSAL = Hypothesis(
    "every token sees all tokens, or all up to itself (causal)",
    lambda f, d: visibility(f, d.n).order is not None,
)
FULL = Hypothesis(
    "every token sees all tokens (no mask, window or padding)",
    lambda f, d: visibility(f, d.n).order == "full",
)
CAUSAL = Hypothesis(
    "every token sees the tokens up to itself (causal, no other mask)",
    lambda f, d: visibility(f, d.n).order == "causal",
)
SELF_SEEN = Hypothesis(
    "every query that sees anything sees its own key",
    lambda f, d: (
        (s := visibility(f, d.n)).order is not None
        or bool((s.seen.diagonal() | ~s.seen.any(1)).all())
    ),
)
HEADS_APART = Hypothesis(
    "one head, or heads concatenated without an output projection",
    lambda f, _: f.heads == 1 or f.O is None,
)
TWO_TOKENS = Hypothesis("at least two tokens", lambda _, d: d.n >= 2)
