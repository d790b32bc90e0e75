"""A theorem in code, and what it reads of a layer: its heads, and which tokens see which.

A theorem is a formula with its norm, domain and source, and hypotheses about the layer. Most are
about the `Visibility` of a layer, which combines all of its masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lipscope._types import Domain, UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import L2, Dot, default_scale
from lipscope.fused.pattern import Pattern
from lipscope.theorems.rounding import frobenius_up, gamma, length_up, norm_up, times_power, up

Owner = TypeVar("Owner")
Rest = ParamSpec("Rest")
Fact = TypeVar("Fact")


def once(
    work: Callable[Concatenate[Owner, Rest], Fact],
) -> Callable[Concatenate[Owner, Rest], Fact]:
    """Remember in its owner what work(owner, ...) gives: a `cached_property` with arguments.

    The theorems of one `bounds` call ask the same things of one layer. A fact must not refer to its
    owner: such a cycle would keep large tensors until the garbage collector comes by.
    """

    @wraps(work)
    def known(owner: Owner, /, *rest: Rest.args, **named: Rest.kwargs) -> Fact:
        facts = vars(owner).setdefault(f"_{work.__name__}", {})
        key = (*rest, *named.values())
        if key not in facts:
            facts[key] = work(owner, *rest, **named)
        return facts[key]

    return known


def rope_stretch(f: SelfAttention) -> float | None:
    """Return the largest factor by which rope stretches a vector; None if not a rotation."""
    rope = f.kernel.rope if isinstance(f.kernel, Dot) else None
    if rope is None:
        return 1.0
    half = rope.cos.shape[1] // 2
    if not all(torch.equal(t[:, :half], t[:, half:]) for t in (rope.cos, rope.sin)):
        return None
    return up(math.sqrt((rope.cos.double().square() + rope.sin.double().square()).max().item()))


@dataclass(eq=False)
class Head:
    """One head; its value matrix is 2^power V, V with entries of order one.

    A product of matrices with at most `steps` operations per entry is off by at most gamma(steps)
    times the product of the Frobenius norms, whatever cancels in it; A_size, beta_size and V_size
    are these products. factor is 2^power, infinite if that overflows.
    """

    one: SelfAttention
    V: Tensor
    V_size: float
    power: int

    def __post_init__(self) -> None:
        one = self.one
        self.d = self.V.shape[1]
        self.k = one.Q.shape[0]
        self.steps = 2 * (self.d + self.k + one.V.shape[0]) + 16
        self.factor = math.inf if self.power > 1023 else math.ldexp(1.0, self.power)
        self.scale = default_scale(one.kernel, self.k)
        bias = one.biases[0] if one.biases else None
        self.query_bias = one.Q.new_zeros(self.k) if bias is None else bias
        keys = abs(self.scale) * frobenius_up(one.K).item()
        self.A_size = up(keys * frobenius_up(one.Q).item())
        self.beta_size = up(keys * length_up(self.query_bias).item())

    @cached_property
    def A(self) -> Tensor:
        return self.scale * (self.one.K.T @ self.one.Q)

    @cached_property
    def A_norm(self) -> float:
        return up(norm_up(self.A).item() + gamma(self.steps) * self.A_size)

    @cached_property
    def beta(self) -> Tensor:
        """K' b_q / sqrt(k), so that b_i = A x_i + beta."""
        return self.scale * (self.one.K.T @ self.query_bias)

    @cached_property
    def beta_norm(self) -> float:
        return up(length_up(self.beta).item() + gamma(self.steps) * self.beta_size)

    @cached_property
    def V_norm(self) -> float:
        return up(norm_up(self.V).item() + gamma(self.steps) * self.V_size)


@once
def heads_of(f: SelfAttention, folded: bool) -> tuple[Head, ...]:
    """Return the heads; with `folded`, each with its part of O multiplied into V."""
    if folded and f.O is None:
        return heads_of(f, folded=False)
    found = []
    for index in range(f.heads):
        one = heads_of(f, folded=False)[index].one if folded else f.head(index)
        # Powers of two are split off first: products of tiny or huge weights stay in range.
        V, power = of_order_one(one.V)
        size = math.ldexp(frobenius_up(one.V).item(), -power)
        if folded and f.O is not None:
            m = V.shape[0]
            W, more = of_order_one(f.O[:, index * m : (index + 1) * m])
            V = W @ V
            size = up(frobenius_up(W).item() * size)
            power += more
        found.append(Head(one=one, V=V, V_size=size, power=power))
    return tuple(found)


def best_head(
    case: Callable[[SelfAttention, Head, Domain], tuple[float, Tensor]],
) -> tuple[Callable[[SelfAttention, Domain], float], Callable[[SelfAttention, Domain], Tensor]]:
    """Return a lower bound and its witness, from the value and the input of a case in one head."""

    def best(f: SelfAttention, domain: Domain) -> tuple[float, Tensor]:
        cases = [case(f, h, domain) for h in heads_of(f, folded=True)]
        return max(cases, key=lambda found: found[0])

    return lambda f, domain: best(f, domain)[0], lambda f, domain: best(f, domain)[1]


def of_order_one(W: Tensor) -> tuple[Tensor, int]:
    """W 2^-p and p, with the largest entry between 1/2 and 1; zeros stay zeros."""
    power = math.frexp(W.abs().max().item())[1]
    return times_power(W, -power), power


def over_heads(f: SelfAttention, bound: Callable[[Head], float]) -> float:
    """Bound a layer from upper bounds for its heads (with V in place of factor * V).

    Concatenated heads add up as squares. Heads under O add up with O_h multiplied into V_h, or as
    squares times ||O||: the smaller of the two.
    """
    # For a single head the folded form suffices: ||O V|| <= ||O|| ||V||.
    if f.O is None or f.heads > 1:
        apart = hypotenuse([head.factor * bound(head) for head in heads_of(f, folded=False)])
        if f.O is None:
            return apart
        squares = up(norm_up(f.O).item() * apart)
    else:
        squares = math.inf
    total = up(math.fsum(head.factor * bound(head) for head in heads_of(f, folded=True)))
    return min(x for x in (total, squares, math.inf) if not math.isnan(x))


def hypotenuse(values: list[float]) -> float:
    """Return the root of the sum of squares, without overflow, rounded up."""
    return up(math.hypot(*values), len(values) + 8)


@dataclass(frozen=True)
class Reach:
    """How strongly scores of tokens in B_R react to the query and to the keys, and their range."""

    query: float
    key: float
    range: float


def reach(head: Head, R: float) -> Reach:
    """a = ||A|| R^2, a_b = R (||A|| R + |beta|) and 2 a_b."""
    # Computed from Q and K separately where A does not determine the scores: with rope they depend
    # on the positions, and under a softcap the key bias no longer cancels.
    kernel = head.one.kernel
    bk = head.one.biases[1] if head.one.biases else None
    rotated = isinstance(kernel, Dot) and kernel.rope is not None
    if rotated or (kernel.softcap is not None and bk is not None):
        s = abs(head.scale) * (rope_stretch(head.one) or 1.0) ** 2
        q = norm_up(head.one.Q).item()
        k = norm_up(head.one.K).item()
        far_q = q * R + length_up(head.query_bias).item()
        far_k = k * R + (0.0 if bk is None else length_up(bk).item())
        query = s * q * far_k * R
        key = s * far_q * k * R
        score_range = 2 * s * far_q * far_k
    else:
        query = head.A_norm * R * R
        key = R * (head.A_norm * R + head.beta_norm)
        score_range = 2 * key
    if kernel.softcap is not None:
        score_range = min(score_range, 2 * kernel.softcap)
    return Reach(up(query), up(key), up(score_range))


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
    domain: Kinds
    hypotheses: tuple[Hypothesis, ...]
    where: str
    fn: Callable[[SelfAttention, Domain], float]
    kind: str = "upper"
    norm: str = "2"
    cite: str = "lipscope"
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
    """Return which of n tokens attend to which; the mask and padding of f must be for n tokens."""
    for name, given in (("mask", f.mask), ("padding", f.padding)):
        if given is not None and tuple(given.shape) != ((n, n) if name == "mask" else (n,)):
            raise UserError(
                f"the domain has n={n} tokens and the layer's {name} has shape "
                f"{tuple(given.shape)}; they must agree"
            )
    return Visibility(
        n=n,
        causal=f.causal,
        window=f.window,
        mask=f.mask,
        padding=f.padding,
        device=f.Q.device,
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
PLAIN_DOT = (DOT, PLAIN_SCORES, NO_ROPE)
