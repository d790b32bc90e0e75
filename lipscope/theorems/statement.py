"""What a theorem is in code: a formula with norm, domain, hypotheses and source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lipscope._types import Domain
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2, Dot, Rope
from lipscope.theorems.heads import rope_stretch, sight

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


def _rope(f: SelfAttention) -> Rope | None:
    return f.kernel.rope if isinstance(f.kernel, Dot) else None


def _nonzero(bias: Tensor | None) -> bool:
    return bias is not None and bool((bias != 0).any())


def _query_bias(f: SelfAttention) -> bool:
    return f.biases is not None and _nonzero(f.biases[0])


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
NO_ROPE = Hypothesis("queries and keys are not rotated (no rope)", lambda f, _: _rope(f) is None)
ROTATION = Hypothesis(
    "rope, if any, rotates: its tables repeat the same angles in both halves",
    lambda f, _: rope_stretch(f) is not None,
)
NO_QUERY_BIAS = Hypothesis("the queries have no bias", lambda f, _: not _query_bias(f))
NO_ADDITIVE = Hypothesis(
    "the mask, if any, only hides keys", lambda f, d: sight(f, d.n).additive is None
)
FULL_OR_CAUSAL = Hypothesis(
    "every token sees all tokens, or all up to itself (causal)",
    lambda f, d: sight(f, d.n).order is not None,
)
FULL = Hypothesis(
    "every token sees all tokens (no mask, window or padding)",
    lambda f, d: sight(f, d.n).order == "full",
)
CAUSAL = Hypothesis(
    "every token sees the tokens up to itself (causal, no other mask)",
    lambda f, d: sight(f, d.n).order == "causal",
)
SELF_SEEN = Hypothesis(
    "every query that sees anything sees its own key",
    lambda f, d: (
        (s := sight(f, d.n)).order is not None or bool((s.seen.diagonal() | ~s.seen.any(1)).all())
    ),
)
HEADS_APART = Hypothesis(
    "one head, or heads concatenated without an output projection",
    lambda f, _: f.heads == 1 or f.O is None,
)
TWO_TOKENS = Hypothesis("at least two tokens", lambda _, d: d.n >= 2)
