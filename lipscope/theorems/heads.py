"""A layer head by head, as the theorems read it: norms of A, b and V, and sums over heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lipscope._types import Domain
from lipscope.attention.layer import SelfAttention
from lipscope.attention.scores import Dot, default_scale
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
