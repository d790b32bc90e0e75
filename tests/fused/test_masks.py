"""Large finite numbers in additive masks: what a whole row shares costs its scores no digits."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lipscope as ls
from lipscope.attention import linearization
from lipscope.fused import pattern, tiled
from lipscope.fused.pattern import Pattern
from tests.naive import dense_jacobian

N, HEADS, SIZE, VALUES = 5, 4, 3, 2
LOWEST = torch.finfo(torch.float64).min
SHIFTS = [-1e9, -1e30, LOWEST, 1e9]


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def float64(x) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def boolean(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.3


def tensors(groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(2, HEADS, N, SIZE, seed=seed),
        draw(2, groups, N, SIZE, seed=seed + 1),
        draw(2, groups, N, VALUES, seed=seed + 2),
    )


def rows_of(kind: str, *lead: int) -> Tensor:
    """Where a shift is added: [..., N, 1]."""
    rows = torch.zeros(*lead, N, 1, dtype=torch.bool)
    if kind == "one row":
        rows[..., 2, :] = True
    elif kind == "some rows of each member":
        rows[0, ..., 1:3, :] = rows[1, ..., 4, :] = True
    else:
        rows[:] = True
    return rows


def shift_free(q, k, v, base, shift, sinks=None, causal=False, padding=None):
    """Softmax of the scores plus `base`, with shifted sinks: nothing large is added to a score."""
    repeat = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
    S = q @ k.mT / math.sqrt(q.shape[-1])
    seen = (base > -math.inf).expand(S.shape)
    seen = seen & torch.ones(N, N, dtype=torch.bool).tril() if causal else seen
    if padding is not None:
        seen = seen & padding[:, None, None, :] & padding[:, None, :, None]
    S = torch.where(seen, S + torch.where(seen, base, 0.0), -1e300)
    if sinks is not None:
        moved = (sinks[:, None, None] - shift).expand(*S.shape[:-1], 1)
        S = torch.cat([S, moved], dim=-1)
    P = torch.where(seen, torch.softmax(S, dim=-1)[..., :N], 0.0)
    return P @ v


def derivatives(f, x, groups):
    """Value and derivatives to second order, in every order of forward and reverse mode."""
    d, e, g = tensors(groups, seed=10), tensors(groups, seed=20), draw(2, HEADS, N, VALUES, seed=30)
    return [
        *jvp(f, x, d),
        *vjp(f, *x)[1](g),
        jvp(lambda *z: jvp(f, z, d)[1], x, e)[1],
        *grad(lambda *z: (jvp(f, z, d)[1] * g).sum(), argnums=(0, 1, 2))(*x),
        *jvp(lambda *z: vjp(f, *z)[1](g), x, e)[1],
    ]


@pytest.fixture(params=[1 << 20, 24], ids=["one tile", "many tiles"])
def tile(request, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", request.param)


CASES = {
    "plain": ((), {}),
    "causal": ((), {"causal": True}),
    "members": ((2, 1), {}),
    "members and heads, causal": ((2, HEADS), {"causal": True}),
    "padding": ((2, 1), {"padding": boolean(2, N, seed=1)}),
    "sinks": ((), {"sinks": draw(HEADS)}),
    "sinks, members, causal": ((2, 1), {"sinks": draw(HEADS), "causal": True}),
}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("case", CASES)
def test_a_shift_of_rows_is_taken_out(case, shift, groups, tile):
    lead, options = CASES[case]
    where = rows_of("some rows of each member" if lead else "one row", *lead)
    # Multiples of 1/2 are exact next to 1e9; nothing is exact next to 1e30.
    base = (2 * draw(*lead, N, N, seed=3)).round() / 2 * (abs(shift) == 1e9)
    base = torch.where(boolean(*lead, N, N, seed=4), base, -torch.inf)
    moved = where * float64(shift)
    x = tensors(groups)
    ours = derivatives(lambda *z: ls.attend(*z, mask=base + moved, **options), x, groups)
    truth = derivatives(lambda *z: shift_free(*z, base, moved, **options), x, groups)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_number_at_every_key_changes_nothing(shift, causal, tile):
    """Written out, or as one number that is expanded: the same bits as without a mask."""
    x = tensors(2)
    none = derivatives(lambda *z: ls.attend(*z, causal=causal), x, 2)
    number = float64([[shift]])
    for mask in (number, number.expand(N, N), number.repeat(2, 1, N, N)):
        ours = derivatives(lambda *z, m=mask: ls.attend(*z, mask=m, causal=causal), x, 2)
        assert all(torch.equal(a, b) for a, b in zip(ours, none, strict=True))


def test_what_is_not_visible_sets_no_level():
    """A key that causal order hides has a 0, the rows see -1e30 only; and the other way round."""
    q, k, v = tensors(2)
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    for seen, unseen in ((-1e30, 0.0), (0.0, 1e30), (-1e30, LOWEST), (LOWEST, -LOWEST)):
        mask = torch.where(later, float64(unseen), float64(seen))
        out = ls.attend(q, k, v, mask=mask, causal=True)
        assert torch.equal(out, ls.attend(q, k, v, causal=True))
    padding = torch.arange(N) < torch.tensor([[3], [5]])
    mask = (padding * float64(-1e30))[:, None, None, :]
    out = ls.attend(q, k, v, mask=mask, padding=padding)
    assert torch.equal(out, ls.attend(q, k, v, padding=padding))
    mask = ~later * float64(-1e30)
    mask[1, 0] = -torch.inf
    out = ls.attend(q, k, v, mask=mask, window=2, causal=True)
    assert torch.equal(out[..., 1, :], v[..., 1, :].repeat_interleave(2, dim=1))


@pytest.mark.parametrize("shift", [-700.0, -40.0, 0.0, 30.0, 800.0, 1e9])
def test_sinks_against_fifty_digits(shift):
    """Weights down to e^-700 with all digits: the sink stays where it is when the keys move."""
    q, k, v = (x[:1, :1] for x in tensors(4))
    mask, sink = (-draw(N, N, seed=3).abs() * 5).round() + shift, draw(1)
    ours = ls.attend(q, k, v, mask=mask, sinks=sink)[0, 0]
    with mpmath.workdps(50):
        for i in range(N):
            s = []
            for key, added in zip(k[0, 0].tolist(), mask[i].tolist(), strict=True):
                score = mpmath.fdot(zip(q[0, 0, i].tolist(), key, strict=True)) / mpmath.sqrt(SIZE)
                s.append(mpmath.exp(score + added))
            Z = mpmath.fsum(s) + mpmath.exp(sink.item())
            for c in range(VALUES):
                terms = [p / Z * v[0, 0, j, c].item() for j, p in enumerate(s)]
                size = mpmath.fsum(abs(t) for t in terms)
                assert abs(mpmath.fsum(terms) - ours[i, c].item()) <= 1e-12 * size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_sinks_beside_the_largest_numbers(dtype, sign):
    """A sink that leaves the range of its dtype takes all the weight, or none."""
    q, k, v = (x.to(dtype) for x in tensors(4))
    mask = torch.full((N, N), sign * torch.finfo(dtype).max, dtype=dtype)
    sinks = torch.full((HEADS,), 60.0, dtype=dtype)
    out = ls.attend(q, k, v, mask=mask, sinks=sinks)
    assert torch.equal(out, ls.attend(q, k, v) if sign > 0 else torch.zeros_like(out))


def test_a_mask_of_fewer_digits_is_subtracted_in_those_of_the_scores():
    q, k, v = tensors(2)
    mask = 10 * draw(N, N, seed=3).float()
    assert torch.equal(ls.attend(q, k, v, mask=mask), ls.attend(q, k, v, mask=mask.double()))


def test_vmap_over_masks():
    q, k, v = (t[0] for t in tensors(2))
    masks = float64([-1e30, 0.0, 1e9])[:, None, None] + 8 * draw(3, N, N).round()
    for given in (masks, masks[:, :1].expand(3, N, N), masks[:1].expand(3, N, N)):
        together = vmap(lambda m: ls.attend(q, k, v, mask=m, causal=True))(given)
        apart = torch.stack([ls.attend(q, k, v, mask=m, causal=True) for m in given])
        torch.testing.assert_close(together, apart, rtol=1e-14, atol=1e-14)


def layer(**options) -> ls.SelfAttention:
    Q, K, V, O = draw(6, 4), draw(3, 4, seed=1), draw(4, 4, seed=2), draw(3, 8, seed=3)
    return ls.SelfAttention(Q, K, V, O, heads=2, kv_heads=1, **options)


@pytest.mark.parametrize("cached", [True, False], ids=["weights kept", "weights recomputed"])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("sinks", [None, draw(2)], ids=["no sinks", "sinks"])
def test_the_constant_of_a_layer(shift, sinks, cached, monkeypatch):
    """Two rows at -1e30 once gave 1.6 % too little, at confidence 0.999999999."""
    if not cached:
        monkeypatch.setattr(linearization, "CACHE", 0)
        monkeypatch.setattr(tiled, "TILE", 24)
    X, mask = draw(6, 4, seed=5), torch.zeros(6, 6, dtype=torch.float64)
    mask[3:5] = shift
    f = layer(causal=True, mask=mask, kernel=ls.Dot(sinks=sinks))
    # Next to a sink, rows far below see no key at all, and rows far above see no sink.
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen[3:5] = sinks is None or shift > 0
    plain = layer(causal=True, mask=seen, kernel=ls.Dot(sinks=sinks))
    without = replace(plain, kernel=ls.Dot())

    def truth(h: int | None = None) -> float:
        layers = (g if h is None else g.head(h) for g in (plain, without))
        J, K = (dense_jacobian(g, X).unflatten(0, (6, -1)) for g in layers)
        return torch.linalg.matrix_norm(torch.cat([J[:3], K[3:5], J[5:]]).flatten(0, 1), 2).item()

    e = ls.local_lipschitz(f, X, tol=1e-10)
    assert e.value == pytest.approx(truth(), rel=1e-12) and e.lower <= truth() <= e.upper
    apart = ls.local_lipschitz(f.heads_apart(), X, tol=1e-10).value
    assert apart.tolist() == pytest.approx([truth(h) for h in range(2)], rel=1e-12)


@pytest.mark.parametrize("rows", ["one row", "every row"])
def test_members_with_masks_of_their_own(rows, monkeypatch):
    X, shifts = draw(3, 6, 4, seed=5), float64([-1e30, 0.0, 1e9])[:, None, None]
    masks = shifts if rows == "every row" else shifts * (torch.arange(6) == 2)[:, None]
    f = layer(mask=masks.expand(3, 6, 6))

    def norms(*layers: ls.SelfAttention) -> Tensor:
        dense = [dense_jacobian(g, x) for x in X for g in layers]
        return float64([torch.linalg.matrix_norm(J, 2) for J in dense])

    truth, heads = norms(layer()), norms(layer().head(0), layer().head(1))
    for cache in (linearization.CACHE, 0):
        monkeypatch.setattr(linearization, "CACHE", cache)
        whole, apart = (ls.local_lipschitz(g, X, tol=1e-10).value for g in (f, f.heads_apart()))
        torch.testing.assert_close(whole, truth, rtol=1e-12, atol=0)
        torch.testing.assert_close(apart, heads, rtol=1e-12, atol=0)


class Largest(TorchDispatchMode):
    """The largest storage, in bytes, that an operation writes."""

    size = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_an_expanded_row_is_not_written_out(causal, monkeypatch):
    n = 256
    monkeypatch.setattr(tiled, "TILE", 16 * n)
    monkeypatch.setattr(pattern, "ENTRIES", 16 * n)
    q, k, v = (draw(1, n, 4, seed=s) for s in range(3))
    mask = draw(1, n, seed=3).expand(n, n)
    rule = Pattern(causal, mask=mask)
    with Largest() as seen:
        o, lse = tiled.forward(q, k, v, rule)
        tiled.jvp(q, k, v, lse, (q, k, v), rule)
        tiled.vjp(q, k, v, lse, o, rule)
        rule.bias_left_by_head(n, n, torch.ones(1, 1).double())
    assert seen.size <= 16 * n * 8
    rule = Pattern(causal, mask=mask.expand(3, 1, n, n))
    rule = rule.each(lambda x: x.repeat_interleave(2, dim=0))
    assert rule.mask.shape == (6, 1, 1, n) and torch.equal(rule.bias[0, 0], mask[:1])


def slow_left(rule: Pattern, n: int, largest: Tensor, heads: int) -> Tensor:
    """bias_left_by_head, the largest of all heads, by its definition, entry by entry."""
    seen, left = rule.visible(n, n, torch.device("cpu")), []
    seen = torch.ones(1, 1, n, n, dtype=torch.bool) if seen is None else seen
    mask = torch.zeros(1) if rule.mask is None else rule.mask
    for m in range(len(largest)):
        cut, worst = 760 + 2 * largest[m].item(), 0.0
        for h in range(heads):
            entries = mask.expand(len(largest), heads, n, n)[m, h].tolist()
            visible = seen.expand(len(largest), heads, n, n)[m, h].tolist()
            for i in range(n):
                pairs = zip(entries[i], visible[i], strict=True)
                own = [b for b, shown in pairs if shown and b > -math.inf]
                level = max(own, default=0.0)
                sizes = [level - b for b in own]
                if rule.sinks is not None:
                    sizes.append(abs(rule.sinks[h].item() - level))
                worst = max([worst, *(x for x in sizes if x <= cut)])
        left.append(worst)
    return torch.tensor(left, dtype=torch.float64)


@pytest.mark.parametrize("entries", [1 << 20, 16])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_of_a_mask(seed, entries, monkeypatch):
    monkeypatch.setattr(pattern, "ENTRIES", entries)
    g = torch.Generator().manual_seed(seed)
    shape = [(N, N), (3, 1, N, N), (3, 2, N, N), (1, N), (2, N, N), (3, 1, 1, N)][seed % 6]
    mask = 10 ** (3 * torch.rand(shape, generator=g, dtype=torch.float64))
    mask = mask * torch.randn(shape, generator=g).sign()
    mask[torch.rand(shape, generator=g) < 0.2] = -torch.inf
    mask[torch.rand(shape, generator=g) < 0.1] = -1e9
    mask = mask - 1e5 * (torch.rand(*shape[:-1], 1, generator=g) < 0.3)
    rule = Pattern(
        causal=seed % 2 == 1,
        window=3 if seed % 4 > 1 else None,
        mask=mask if seed else None,
        keys=boolean(3, N, seed=seed) if seed % 3 == 0 else None,
        queries=boolean(3, N, seed=seed) if seed % 3 == 0 else None,
        sinks=100 * torch.randn(2, generator=g, dtype=torch.float64) if seed < 6 else None,
    )
    largest = torch.tensor([0.0, 3.0, 400.0], dtype=torch.float64)
    left = rule.bias_left_by_head(N, N, largest[:, None]).amax(dim=-1)
    assert left.dtype == torch.float64
    torch.testing.assert_close(left, slow_left(rule, N, largest, 2), rtol=1e-15, atol=0)
    assert (left <= 760 + 2 * largest).all()


def test_what_is_left_out_of_the_count_has_no_weight():
    q, k, v = tensors(4)
    largest = (q.norm(dim=-1).amax() * k.norm(dim=-1).amax() / math.sqrt(SIZE)).item()
    mask = torch.zeros(N, N, dtype=torch.float64)
    mask[:, 1::2] = -(760 + 2 * largest) * (1 + 1e-12)
    without = mask.masked_fill(mask < 0, -torch.inf)
    assert torch.equal(ls.attend(q, k, v, mask=mask), ls.attend(q, k, v, mask=without))
    assert Pattern(mask=mask).bias_left_by_head(N, N, float64([[largest]])) == 0


def test_no_kernel_takes_a_mask_of_more_digits_than_it_keeps():
    triton_operands = pytest.importorskip("lipscope.fused.triton_operands")
    q, k, v = (x.float() for x in tensors(4))
    rule = Pattern(mask=torch.zeros(N, N))
    assert triton_operands.supports(q, k, v, rule)
    double = Pattern(mask=torch.zeros(N, N, dtype=torch.float64))
    assert not triton_operands.supports(q, k, v, double)
