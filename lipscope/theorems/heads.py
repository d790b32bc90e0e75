"""A layer head by head, as the theorems read it: norms of A, b, V, visibility, sums over heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot, default_scale
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


@dataclass(frozen=True, eq=False)
class Sight:
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
        if self.additive is not None or not torch.equal(self.seen, whole):
            return (
                "causal" if self.additive is None and torch.equal(self.seen, whole.tril()) else None
            )
        return "full"

    @property
    def additive(self) -> Tensor | None:
        """The mask if it does more than hide keys; a constant shift of a row changes nothing."""
        return self.mask if bool((self.spread > 0).any()) else None

    @cached_property
    def seen(self) -> Tensor:
        """[n, n] boolean: i attends to j."""
        n = self.n
        mask = self.mask
        boolean = mask if mask is None or mask.dtype == torch.bool else mask > -math.inf
        pattern = Pattern(
            causal=self.causal,
            window=self.window,
            mask=None if boolean is None else boolean[None],
            queries=self.padding,
            keys=self.padding,
        )
        seen = pattern.visible(n, n, self.device)
        return (
            torch.ones(n, n, dtype=torch.bool, device=self.device)
            if seen is None
            else seen.reshape(seen.shape[-2:]).expand(n, n)
        )

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
    def regard(self) -> float:
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
        # `regard` 2, where queries may see each other in circles.
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
        """The token that most others see, and how many further keys each of those sees."""
        if self.order is not None:
            return 0, self.counts[1:] - 1
        itself = torch.eye(self.n, dtype=torch.bool, device=self.device)
        special = int((self.seen & ~itself).sum(dim=0).argmax())
        rows = self.seen[:, special].clone()
        rows[special] = False
        return special, self.counts[rows] - 1


@once
def sight(f: SelfAttention, n: int) -> Sight:
    """Which of n tokens attend to which, after `check_masks`."""
    check_masks(f, n)
    return Sight(
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


def rope_stretch(f: SelfAttention) -> float | None:
    """The largest factor by which rope stretches a vector, about 1; None if not a rotation."""
    rope = f.kernel.rope if isinstance(f.kernel, Dot) else None
    if rope is None:
        return 1.0
    half = rope.cos.shape[1] // 2
    if not all(torch.equal(t[:, :half], t[:, half:]) for t in (rope.cos, rope.sin)):
        return None
    return up(math.sqrt((rope.cos.double().square() + rope.sin.double().square()).max().item()))


@dataclass(frozen=True, eq=False)
class Head:
    """One head; its value matrix is 2^power V, V with entries of order one.

    A product of matrices with at most `steps` operations per entry is off by at most gamma(steps)
    times the product of the Frobenius norms, whatever cancels in it; A_size, beta_size and V_size
    are these products.
    """

    one: SelfAttention
    V: Tensor
    V_size: float
    power: int

    @property
    def factor(self) -> float:
        """2^power; infinite where that overflows."""
        return math.inf if self.power > 1023 else math.ldexp(1.0, self.power)

    @property
    def d(self) -> int:
        return self.V.shape[1]

    @property
    def k(self) -> int:
        return self.one.Q.shape[0]

    @property
    def steps(self) -> int:
        return 2 * (self.d + self.k + self.one.V.shape[0]) + 16

    @cached_property
    def scale(self) -> float:
        return default_scale(self.one.kernel, self.k)

    @cached_property
    def A(self) -> Tensor:
        return self.scale * (self.one.K.T @ self.one.Q)

    @cached_property
    def A_size(self) -> float:
        return up(
            abs(self.scale) * frobenius_up(self.one.K).item() * frobenius_up(self.one.Q).item()
        )

    @cached_property
    def A_norm(self) -> float:
        return up(norm_up(self.A).item() + gamma(self.steps) * self.A_size)

    @cached_property
    def query_bias(self) -> Tensor:
        bias = self.one.biases[0] if self.one.biases else None
        return self.one.Q.new_zeros(self.k) if bias is None else bias

    @cached_property
    def beta(self) -> Tensor:
        """K' b_q / sqrt(k), so that b_i = A x_i + beta."""
        return self.scale * (self.one.K.T @ self.query_bias)

    @cached_property
    def beta_size(self) -> float:
        return up(
            abs(self.scale) * frobenius_up(self.one.K).item() * length_up(self.query_bias).item()
        )

    @cached_property
    def beta_norm(self) -> float:
        return up(length_up(self.beta).item() + gamma(self.steps) * self.beta_size)

    @cached_property
    def V_norm(self) -> float:
        return up(norm_up(self.V).item() + gamma(self.steps) * self.V_size)


@once
def heads_of(f: SelfAttention, folded: bool) -> tuple[Head, ...]:
    """The heads; with `folded` the output projection is multiplied into the values of each head."""
    if folded:
        return tuple(_folded(f, h, head) for h, head in enumerate(heads_of(f, folded=False)))
    found = []
    for one in map(f.head, range(f.heads)):
        # Powers of two are split off first: products of tiny or huge weights stay in range.
        V, power = of_order_one(one.V)
        size = math.ldexp(frobenius_up(one.V).item(), -power)
        found.append(Head(one=one, V=V, V_size=size, power=power))
    return tuple(found)


def _folded(f: SelfAttention, h: int, head: Head) -> Head:
    """Head h with its part of the output projection multiplied into V."""
    if f.O is None:
        return head
    m = head.V.shape[0]
    W, power = of_order_one(f.O[:, h * m : (h + 1) * m])
    size = up(frobenius_up(W).item() * head.V_size)
    return Head(one=head.one, V=W @ head.V, V_size=size, power=head.power + power)


def real_eigenpairs(
    A: Float[Tensor, "d d"],
) -> tuple[Float[Tensor, "r"], Float[Tensor, "d r"]]:
    """The real eigenvalues of a square matrix, in no order, and their eigenvectors as columns."""
    values, vectors = torch.linalg.eig(A)
    # Eigenvalues come in floating point: a real one may carry a tiny imaginary part.
    real = values.imag.abs() <= 1e-12 * values.abs().max()
    return values[real].real, vectors[:, real].real


def of_order_one(W: Tensor) -> tuple[Tensor, int]:
    """W 2^-p and p, with the largest entry between 1/2 and 1; zeros stay zeros."""
    power = math.frexp(W.abs().max().item())[1]
    return times_power(W, -power), power


def over_heads(f: SelfAttention, bound: Callable[[Head], float]) -> float:
    """An upper bound for a layer from upper bounds for its heads (with V in place of factor * V).

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
    """The root of the sum of squares, without overflow, rounded up."""
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
    capped = kernel.softcap is not None
    if rotated or (capped and bk is not None):
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
    score_range = (
        min(score_range, 2 * kernel.softcap) if kernel.softcap is not None else score_range
    )
    return Reach(up(query), up(key), up(score_range))
