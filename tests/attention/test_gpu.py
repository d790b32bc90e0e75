"""The whole core on a GPU: the same kinds of problem as on the CPU, through the fused kernels where they fit."""

import pytest
import torch

import lipscope as ls
from lipscope.attention import linearization
from tests.cases import KINDS, problem

pytestmark = pytest.mark.gpu

INSIDE_FLOAT32 = [kind for kind in KINDS if "huge" not in kind and "tiny" not in kind and "saturated" not in kind]


@pytest.mark.parametrize("kind", INSIDE_FLOAT32)
def test_float32_on_the_gpu_against_float64_on_the_cpu(kind, monkeypatch):
    """With nothing cached every product goes through the kernels, or through tiles where they do not fit."""
    monkeypatch.setattr(linearization, "CACHE", 0)
    for seed in range(3):
        f, X = problem(kind, seed)
        single, x = f.to(torch.float32), X.float()
        exact = ls.local_lipschitz(single.double(), x.double(), tol=1e-10).value
        J = ls.jacobian(single.to("cuda"), x.cuda())
        e = ls.spectral_norm(J, tol=1e-5)
        assert e.status.ok, f"{kind} {seed}: {e}"
        assert abs(e.value - exact) <= max(float(J.rounding), 1e-5) * exact, f"{kind} {seed}: {e.value} and {exact}"
        assert e.right.is_cuda and e.right.dtype == torch.float32


@pytest.mark.parametrize("kind", ["causal", "grouped keys", "rotary", "softcap", "sinks", "padding"])
def test_float64_on_the_gpu_keeps_its_certificate(kind):
    f, X = problem(kind, 0)
    exact = ls.local_lipschitz(f, X, tol=1e-10).value
    e = ls.local_lipschitz(f.to("cuda"), X.cuda(), tol=1e-8)
    assert e.value == pytest.approx(exact, rel=1e-10) and e.lower <= exact * (1 + 1e-12) and exact <= e.upper


def test_attend_on_the_gpu_to_second_order():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 33, 16, generator=g) for h in (4, 2, 2))
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        x = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(ls.attend(*x, causal=True).square().sum(), x, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), x)
        results.append([t.detach().cpu().double() for t in (*first, *second)])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_rough_steps_then_exact_ones():
    """A long layer in float32 is solved by bfloat16 steps first; the value is the exact operator's."""
    g = torch.Generator(device="cuda").manual_seed(0)
    Q, K, V, O = (torch.randn(128, 128, generator=g, device="cuda") / 128**0.5 for _ in range(4))
    f, X = ls.SelfAttention(Q, K, V, O, heads=2, causal=True), torch.randn(6000, 128, generator=g, device="cuda")
    J = ls.jacobian(f, X)
    assert J.rough is not None
    e = ls.spectral_norm(J, tol=1e-4)
    exact = ls.local_lipschitz(f, X, tol=1e-8, precision="exact")
    assert e.status.ok and abs(e.value / exact.value - 1) < 1e-5


def test_heads_larger_than_the_kernels_take_fall_back():
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 1, 50, 200, generator=g, device="cuda") for _ in range(3))
    expected = ls.attend(q.cpu().double(), k.cpu().double(), v.cpu().double())
    assert (ls.attend(q, k, v).cpu().double() - expected).norm() <= 1e-5 * expected.norm()


def test_mixed_devices_are_refused():
    with pytest.raises((ls.UserError, RuntimeError), match="device"):
        ls.attend(torch.randn(1, 4, 8).cuda(), torch.randn(1, 4, 8), torch.randn(1, 4, 8))
