"""Whole solves on one GPU beside their kernels, in one run; writes results/<device>.json.

    python -m benchmarks.gpu                  # kernels at n = 4096 .. 131072, a layer, accuracy
    python -m benchmarks.gpu --layer          # a layer of 131,072 tokens alone
    python -m benchmarks.gpu --million        # a layer of 1,048,576 tokens alone

A layer has 12 heads x 64, causal, at Gaussian tokens. Its time includes all but compilation. Starts
are seeded: another one takes a few steps more or fewer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad

import lipscope as ls
from benchmarks import gpu_kernels, gpu_model
from benchmarks.gpu_kernels import Row, show
from lipscope.fused import triton_forward
from lipscope.fused.pattern import Pattern

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH = 12, 768
STARTS = 5
"""Random starts of the layer of 131,072 tokens; a million tokens are solved from one."""


def layer(n: int, causal: bool, seed: int) -> tuple[ls.SelfAttention, Tensor]:
    """Gaussian weights and tokens, scaled as at initialisation."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    Q, K, V, O = (draw(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(4))
    return ls.SelfAttention(Q, K, V, O, heads=HEADS, causal=causal), draw(n, WIDTH)


def solve(name: str, n: int, seconds: float, gibibytes: float) -> list[Row]:
    """The constant of a causal layer to 1e-4: time, memory, error against a tighter solve.

    The error of a separated sigma is the square of the residual, so a residual of 1e-2 suffices.
    The time is the median over several starts, error and residual are the largest.
    """
    f, X = layer(n, causal=True, seed=n)
    values, residuals, times, solved = [], [], [], True
    for seed in range(STARTS if n <= 131072 else 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        e = ls.local_lipschitz(f, X, tol=1e-2, solver=ls.Solver(seed=seed))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        values.append(float(e.value))
        residuals.append(float(e.residual))
        solved &= e.status is ls.Status.CONVERGED
        print(
            f"{name}: sigma {e.value:.6f} in {e.steps:.0f} steps, {times[-1]:.2f} s, "
            f"{e.status.value}",
            flush=True,
        )
        del e  # the vectors of one solve are not memory of the next
    elapsed, held = statistics.median(times), torch.cuda.max_memory_allocated() / 2**30
    residual = max(residuals)
    rows = [
        Row(
            name=name,
            n=n,
            causal=True,
            dtype="float32",
            value=elapsed,
            unit="s",
            residual=residual,
            target=seconds,
            met=solved and elapsed <= seconds,
        ),
        Row(
            name=name,
            n=n,
            causal=True,
            dtype="float32",
            value=held,
            unit="GiB",
            residual=residual,
            target=gibibytes,
            met=held <= gibibytes,
        ),
    ]
    if n <= 131072:
        exact = ls.local_lipschitz(f, X, tol=1e-4, solver=ls.Solver(seed=0)).value
        error = max(abs(value / exact - 1) for value in values)
        rows.append(
            Row(
                name=name,
                n=n,
                causal=True,
                dtype="float32",
                value=error,
                unit="relative error",
                residual=residual,
                target=1e-4,
                met=error <= 1e-4,
            )
        )
    return rows


def storage(n: int) -> list[Row]:
    """The same solve with the Krylov vectors stored elsewhere; seconds and memory, no target."""
    f, X = layer(n, causal=True, seed=n)
    rows = []
    for basis in ("native", "bfloat16", "host"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        e = ls.local_lipschitz(f, X, tol=1e-2, solver=ls.Solver(seed=0, basis=basis))
        torch.cuda.synchronize()
        elapsed, held = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
        print(
            f"basis {basis}: sigma {e.value:.7f} in {e.steps} steps, {e.status.value}", flush=True
        )
        for value, unit in ((elapsed, "s"), (held, "GiB")):
            rows.append(
                Row(
                    name=f"basis_{basis}",
                    n=n,
                    causal=True,
                    dtype="float32",
                    value=value,
                    unit=unit,
                    residual=float(e.residual),
                )
            )
    return rows


def eager(f: ls.SelfAttention, X: Tensor) -> Tensor:
    """The layer, written out."""
    assert f.O is not None
    q, k, v = ((X @ W.T).unflatten(-1, (HEADS, -1)).transpose(0, 1) for W in (f.Q, f.K, f.V))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(len(X), len(X), dtype=torch.bool, device=X.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf) if f.causal else scores
    return (torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1) @ f.O.T


def accuracy(n: int, causal: bool) -> Row:
    """Relative error of sigma in float32 through the kernels against eager float64 autograd."""
    f, X = layer(n, causal, seed=n)
    mine, exact = ls.local_lipschitz(f, X, tol=1e-5), f.double()
    truth = ls.local_lipschitz(lambda x: eager(exact, x), X.double(), tol=1e-9)
    error = abs(float(mine.value) / float(truth.value) - 1)
    return Row(
        name="sigma_error",
        n=n,
        causal=causal,
        dtype="float32",
        value=error,
        unit="relative",
        residual=float(mine.residual),
        target=1e-5,
        met=error <= 1e-5,
    )


def jvp_flash(n: int) -> list[Row]:
    """Time of jvp_flash_attention, if installed, for value and tangent, relative to ours."""
    if find_spec("jvp_flash_attention") is None:
        return []
    from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found]  # not a dependency

    point, tangent, _ = gpu_kernels.problem(n, WIDTH // HEADS, torch.bfloat16)
    (q, k, v), (dq, dk, dv), pattern = point, tangent, Pattern()
    o, lse = triton_forward.forward(q, k, v, pattern)

    def theirs() -> None:
        with forward_ad.dual_level():
            JVPAttn.fwd_dual(*map(forward_ad.make_dual, point, tangent), sm_scale=1.0)

    slower = gpu_kernels.seconds(theirs) / gpu_kernels.seconds(
        lambda: triton_forward.jvp(q, k, v, o, lse, (dq, dk, dv), pattern)
    )
    return [
        Row(
            name="jvp_flash",
            n=n,
            causal=False,
            dtype="bfloat16",
            value=slower,
            unit="times as slow",
            residual=None,
            target=5.0,
            met=slower >= 5,
        )
    ]


def save(rows: list[Row], whole: bool = False) -> None:
    """Update results/<device>.json; `earlier` names rows that the last whole run left."""
    device = torch.cuda.get_device_name()
    out = RESULTS / f"{device.split()[-1].lower()}.json"
    out.parent.mkdir(exist_ok=True)
    names = {row.name for row in rows}
    before = json.loads(out.read_text()) if out.exists() else {"rows": []}
    versions = {
        "lipscope": ls.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    kept = [row for row in before["rows"] if row["name"] not in names]
    earlier = {row["name"] for row in kept} if whole else {*before.get("earlier", ())} - names
    rows_now = [asdict(row) for row in rows]
    report = {
        "device": device,
        "versions": versions,
        "earlier": sorted(earlier),
        "rows": kept + rows_now,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--million", action="store_true", help="only the layer of 1,048,576 tokens")
    parser.add_argument("--layer", action="store_true", help="only the layer of 131,072 tokens")
    options = parser.parse_args()
    ls.local_lipschitz(
        *layer(16384, causal=True, seed=0), tol=1e-2
    )  # compiles what the solves below use
    if options.million:
        save([show(row) for row in solve("million", 1 << 20, seconds=480, gibibytes=130)])
        return
    rows = [show(row) for row in solve("layer_sigma", 131072, seconds=6, gibibytes=32)]
    if options.layer:
        save(rows)
        return
    rows += [show(accuracy(n, causal)) for n, causal in ((2048, True), (2048, False), (5001, True))]
    rows += [show(row) for row in jvp_flash(65536)]
    rows += [show(row) for row in storage(131072)]
    rows += gpu_model.rows([8192, 32768, 131072])
    rows += gpu_kernels.measure([4096, 16384, 65536, 131072], WIDTH // HEADS)
    save(rows, whole=True)


if __name__ == "__main__":
    main()
