"""Every theorem against measured constants: no input of a domain may exceed a bound on it.

    python -m tests.campaigns.bound_comparisons 1000000 --workers 14 --out comparisons.jsonl

A comparison is one bound and one input of its domain. Inputs are random, the papers' constructions
and what a search makes of the worst of them. Constants come from dense float64 Jacobians of a plain
implementation (`tests/naive.py`), many inputs at a time. Where one comes within 1e-6 of a bound, or
overflows, it is enclosed in extended precision (`tests/enclosed.py`), and a fault is an enclosure
that lies above the bound. Lower bounds are compared with the constant at their witness and with
every upper bound.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

import lipscope as ls
from lipscope._types import Around, Ball, Domain, Everywhere, Point
from lipscope.nn.contractive import ATTENTIONS
from lipscope.theorems.composition import Attention, Chain, Part, Residual, network_bound
from lipscope.theorems.registry import REGISTRY, enclosing, evaluate, failed_hypothesis
from lipscope.theorems.statement import Bound
from tests import enclosed
from tests.campaigns.random_problems import mixed_layer
from tests.campaigns.runner import Result, campaign
from tests.cases import KINDS, problem
from tests.naive import naive_layer
from tests.test_certificates import Draw
from tests.theorems.soundness import configurations, domains, inside
from tests.theorems.test_composition import network

CHUNK, LAYERS_EACH = 5000, 40
"""Comparisons in a chunk at least, and layers at least; in all there are several times more."""

BATCH = 24
"""Random inputs of a domain, and inputs in each step of the search from the worst of them."""

STEPS = (0.3, 0.1, 0.03)
"""By how much the search moves inputs, relative to their size."""

CLOSE = 1e-6
"""A constant this close to a bound is enclosed in extended precision."""

Layer = ls.SelfAttention
Map = Callable[[Tensor], Tensor]


# Layers and inputs


def factored(draw: Draw) -> tuple[Layer, Tensor]:
    """L2 attention whose values factor through the queries exactly: a constant everywhere."""
    heads, n, d, k, m = (
        draw.pick(*sizes) for sizes in ((1, 2, 3), (2, 3, 6), (1, 3, 5), (1, 2), (1, 3))
    )
    Q, M = (torch.round(16 * x) / 16 for x in (draw.normal(heads, k, d), draw.normal(heads, m, k)))
    V = (M @ Q).flatten(0, 1)
    O = draw.pick(None, draw.normal(3, heads * m))
    options = {"causal": draw.coin(), "kernel": ls.L2(scale=draw.pick(None, draw.power(-1, 1)))}
    Q = Q.flatten(0, 1)
    f = ls.theorems.FactoredAttention(Q, Q, V, O, heads=heads, M=M, **options)
    return f, draw.power(-1, 1) * draw.normal(n, d)


def tied(draw: Draw) -> tuple[Layer, Tensor]:
    """L2 attention with Q = K; values factor through the queries nearly, or not."""
    f, X = factored(draw)
    f = Layer(f.Q, f.K, f.V, f.O, heads=f.heads, causal=f.causal, kernel=f.kernel)
    return replace(f, V=f.V + draw.pick(0.0, 1e-9, 1e-2, 1.0) * draw.normal(*f.V.shape)), X


def longer(draw: Draw) -> tuple[Layer, Tensor]:
    """One head in one or two dimensions, many tokens: where the rates in n are tight."""
    n, d = draw.pick(12, 24, 40), draw.pick(1, 2)
    f = draw.layer(d=d, k=d, m=d, causal=draw.coin(), kernel=ls.Dot(scale=1.0))
    return replace(f, Q=draw.pick(1.0, -1.0) * f.K if draw.coin() else f.Q), draw.normal(n, d)


def named(draw: Draw) -> tuple[Layer, Tensor]:
    return problem(draw.pick(*KINDS), draw.seed)


LAYERS = [named, named, named, mixed_layer, mixed_layer, factored, tied, longer]


def spread(X: Tensor, domain: Domain, draw: Draw) -> Tensor:
    """Random inputs of the domain, [BATCH, n, d]; on its edge for the most part."""
    Y = draw.normal(BATCH, *X.shape)
    if isinstance(domain, Around):
        size = domain.r * draw.pick(1.0, draw.between(0, 1))
        return domain.X + size * Y / Y.flatten(1).norm(dim=1)[:, None, None]
    lengths = Y.norm(dim=2, keepdim=True).clamp_min(1e-300)
    if isinstance(domain, Ball):
        inner = draw.pick(torch.ones(BATCH, X.shape[0], 1), draw.normal(BATCH, X.shape[0], 1).abs())
        return domain.R * Y / lengths * inner.clamp(max=1.0)
    return Y * 10 ** (4 * torch.rand(BATCH, 1, 1, generator=draw.g, dtype=torch.float64) - 2)


def constructions(f: Layer, X: Tensor, domain: Domain, draw: Draw) -> list[Tensor]:
    """The papers' worst inputs, and the witnesses of the lower bounds."""
    if isinstance(domain, Point | Around):
        return []
    R = domain.R if isinstance(domain, Ball) else 10.0
    found = list(configurations(X, R, draw.g))
    if isinstance(f.kernel, ls.Dot) and len(X) > 1 and R < 1e50:
        found += [one.X for one in ls.attack.explicit_inputs(f, Ball(R, len(X)))]
    return [inside(Y, domain) for Y in found]


def generations(
    f: Layer, X: Tensor, domain: Domain, draw: Draw, size: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Inputs of the domain; each generation moves the worst of the one before."""
    if isinstance(domain, Point):
        yield domain.X[None]
        return
    first = [Y[None] for Y in constructions(f, X, domain, draw)]
    batch = torch.cat([*first, X[None], spread(X, domain, draw)])
    yield batch
    for step in STEPS:
        worst = batch[size(batch).nan_to_num(nan=-1.0).topk(6).indices]
        moved = worst.repeat(BATCH // 6, 1, 1)
        scale = (
            domain.r if isinstance(domain, Around) else moved.abs().amax(dim=(1, 2))[:, None, None]
        )
        moved = moved + step * scale * draw.normal(*moved.shape)
        batch = torch.stack([inside(Y, domain) for Y in moved])
        yield batch


# Constants


def jacobians(f: Map, batch: Tensor) -> Tensor:
    """Dense Jacobians [B, outputs, inputs]."""
    J = torch.func.vmap(torch.func.jacrev(f))(batch)
    return J.reshape(len(batch), -1, batch[0].numel())


def two_norm(J: Tensor) -> Tensor:
    """Largest singular values; NaN where an entry is not finite."""
    finite = J.isfinite().all(dim=(1, 2))
    size = J.abs().amax(dim=(1, 2)).clamp_min(1e-300)
    safe = torch.where(finite[:, None, None], J / size[:, None, None], 0.0)
    return torch.where(finite, torch.linalg.matrix_norm(safe, 2) * size, math.nan)


def row_sum(J: Tensor) -> Tensor:
    return J.abs().sum(dim=2).amax(dim=1)


def token_norm(J: Tensor, n: int) -> Tensor:
    """A lower bound of sup_i |sum_j J_ij e_j| over |e_j| <= 1, by alternating maximisation."""
    size = J.abs().amax(dim=(1, 2)).clamp_min(1e-300)
    blocks = (J / size[:, None, None]).unflatten(2, (n, -1)).unflatten(1, (n, -1))  # B i a j b
    target = torch.ones(blocks.shape[:3], dtype=torch.float64)
    best = torch.zeros(len(J), dtype=torch.float64)
    for _ in range(6):
        e = torch.einsum("Biajb,Bia->Bijb", blocks, target)
        e = e / e.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        target = torch.einsum("Biajb,Bijb->Bia", blocks, e)
        lengths = target.norm(dim=-1)
        best = torch.maximum(best, lengths.amax(dim=1))
        target = target / lengths[..., None].clamp_min(1e-300)
    return best * size


def weighted_norm(f: Layer, batch: Tensor, draw: Draw) -> Tensor:
    """||W^(1/2) J W^(-1/2)|| for tokens as atoms of mass w, with log w added to the scores."""
    n = batch.shape[1]
    logs = torch.log_softmax(3 * draw.normal(n), 0)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1) & f.causal
    weighted = replace(f, mask=logs.expand(n, n).masked_fill(hidden, -math.inf))
    J = jacobians(lambda Z: naive_layer(weighted, Z), batch)
    root = (logs / 2).exp()
    left, right = (root.repeat_interleave(size // n) for size in J.shape[1:])
    return two_norm(left[:, None] * J / right)


ENCLOSED = {"2": enclosed.sigma, "inf": enclosed.row_sum}
"""Norms in which a close case is decided in extended precision."""


def measured(norm: str, f: Layer, batch: Tensor, J: Tensor, draw: Draw) -> Tensor:
    """The constants in a norm, or lower bounds of them."""
    if norm == "W2":
        return weighted_norm(f, batch, draw)
    if norm == "inf2":
        return token_norm(J, batch.shape[1])
    return two_norm(J) if norm == "2" else row_sum(J)


# Comparisons


def compare(
    name: str, value: float, found: Tensor, result: Result, where: str,
    again: Callable[[int], enclosed.Interval] | None,
) -> None:  # fmt: skip
    """Hold all constants against one upper bound."""
    result.count(name, "comparisons", len(found))
    known = found.nan_to_num(nan=0.0)
    if value > 0 and not math.isinf(value):
        worst = known.max().item() / value
        result.worst[name] = max(result.worst.get(name, 0.0), worst)
    for i in torch.nonzero((known > value * (1 - CLOSE)) | found.isnan())[:, 0].tolist():
        if math.isinf(value):
            continue
        if again is not None:
            result.count(name, "enclosed")
            wrong = again(i).low > value
        else:
            result.count(name, "close" if not found[i].isnan() else "overflow")
            wrong = found[i].item() > value * (1 + 1e-9)
        if wrong:
            result.count(name, "violations")
            result.faults.append(f"{where}, {name}: {found[i].item()!r} > {value!r}")


def audit(f: Layer, X: Tensor, draw: Draw, result: Result, where: str) -> None:
    """All theorems on all kinds of domains of one layer."""
    f = f.double()
    plain = naive_map(f)
    R = X.norm(dim=1).max().item() + 1e-200
    points = [Point(Y) for Y in configurations(X, R * draw.power(-1, 0.5), draw.g)]
    for domain in [*domains(X), *points]:
        offered: list[tuple[Bound, float, Domain]] = []
        for bound in REGISTRY:
            within = enclosing(domain, bound.domain, bound.kind)
            if within is not None and failed_hypothesis(bound, f, within) is None:
                offered.append((bound, evaluate(bound, f, within), within))
        uppers = [(bound, value) for bound, value, _ in offered if bound.kind == "upper"]
        here = f"{where} on {type(domain).__name__}"

        def size(batch: Tensor) -> Tensor:
            return two_norm(jacobians(plain, batch))

        for batch in generations(f, X, domain, draw, size) if uppers else ():
            J = jacobians(plain, batch)
            for norm in sorted({bound.norm for bound, _ in uppers}):
                found, exact = measured(norm, f, batch, J, draw), ENCLOSED.get(norm)

                def again(i: int, batch=batch, exact=exact) -> enclosed.Interval:
                    return exact(enclosed.layer_jacobian(f, batch[i]))

                for bound, value in uppers:
                    if bound.norm == norm:
                        name = f"{bound.name} ({norm})"
                        compare(name, value, found, result, here, again if exact else None)
        for bound, value, within in offered:
            if bound.kind == "lower":
                compare_lower(bound, value, f, within, uppers, result, here)


def naive_map(f: Layer) -> Map:
    return lambda Z: naive_layer(f, Z)


def compare_lower(
    bound: Bound, value: float, f: Layer, domain: Domain, uppers: list, result: Result, where: str
) -> None:
    """A lower bound is at most every upper bound, and at most the constant at its witness."""
    above = [upper for other, upper in uppers if other.norm == bound.norm]
    witness = bound.witness and bound.witness(f, domain)
    Y = domain.X if isinstance(domain, Point) else witness
    high = [enclosed.sigma(enclosed.layer_jacobian(f, Y)).high] if Y is not None else []
    for limit in above + high:
        result.count(bound.name, "comparisons")
        if not value <= limit:
            result.count(bound.name, "violations")
            result.faults.append(f"{where}, {bound.name}: {value!r} > {limit!r}")
        elif 0 < limit < math.inf:
            worst = result.worst.get(bound.name, 0.0)
            result.worst[bound.name] = max(worst, float(value / limit))


def audit_layer(draw: Draw, result: Result, where: str) -> None:
    """The constants of the layers of lipscope.nn, over inputs of any size."""
    torch.manual_seed(draw.seed)
    n, heads, causal = draw.pick(2, 4, 7), draw.pick(1, 2), draw.coin()
    kind = draw.pick("l2", "contractive")
    layer = ATTENTIONS[kind](4 * heads, heads, causal).double()
    f, X = layer.as_map(n), draw.normal(n, 4 * heads)
    with torch.no_grad():
        limits = {norm: layer.lipschitz_bound(n, norm) for norm in ("2", "inf")}
    f = f.to(torch.float64)
    for batch in generations(
        f, X, Everywhere(n), draw, lambda Z: two_norm(jacobians(naive_map(f), Z))
    ):
        J = jacobians(naive_map(f), batch.detach()).detach()
        for norm, value in limits.items():
            compare(
                f"{kind} layer ({norm})",
                value,
                measured(norm, f, batch, J, draw),
                result,
                where,
                None,
            )


def audit_network(draw: Draw, result: Result, where: str) -> None:
    """Norm layers, attention, residual branches and affine maps in a chain."""
    net, X = network(draw.seed)
    R = X.norm(dim=1).max().item() * (1 + 1e-12)
    f, plain = net.parts[0].inner.parts[1].f, naive_part(net)
    for domain in (Ball(R, len(X)), Everywhere(len(X))):
        value = network_bound(net, domain)
        for batch in generations(f, X, domain, draw, lambda Z: two_norm(jacobians(plain, Z))):
            compare("network (2)", value, two_norm(jacobians(plain, batch)), result, where, None)


def naive_part(part: Part) -> Map:
    """The same network with plain attention."""
    if isinstance(part, Chain):
        return reduce(lambda f, g: lambda Z: g(f(Z)), map(naive_part, part.parts))
    if isinstance(part, Residual):
        inner = naive_part(part.inner)
        return lambda Z: Z + inner(Z)
    return naive_map(part.f) if isinstance(part, Attention) else part


def chunk(number: int) -> Result:
    """Layers until there are enough comparisons."""
    result, i = Result(), 0
    while i < LAYERS_EACH or result.total()["comparisons"] < CHUNK:
        draw = Draw(1_000_000 * (number + 1) + i)
        where = f"chunk {number}, layer {i}"
        try:
            if i % 10 == 8:
                audit_layer(draw, result, where)
            elif i % 10 == 9:
                audit_network(draw, result, where)
            else:
                make = draw.pick(*LAYERS)
                audit(*make(draw), draw, result, f"{where}, {make.__name__}")
        except Exception:
            result.count("all", "exceptions")
            last = traceback.format_exc().strip().splitlines()
            result.faults.append(f"{where}: {' | '.join(last[-5:])}")
        i += 1
    return result


if __name__ == "__main__":
    sys.exit(campaign(chunk, CHUNK, 1_000_000, __doc__ or ""))
