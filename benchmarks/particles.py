"""10,000 particles in dimension 2 to t = 10, against a dense n x n implementation in torch.

Both velocities are evaluated in turn, in float64, at the same tokens; each also runs in a process
of its own, where its peak memory is measured, without that of the tokens. Then the flow runs to its
end.

    python benchmarks/particles.py
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lipscope as ls
from lipscope.dynamics.particles import velocity_of
from lipscope.dynamics.simulation import PRESETS, layer_of, tokens_of

ROUNDS = 3
STAGES = 6
"""Evaluations per step of Dormand-Prince 5(4)."""


def dense(X: Tensor) -> Tensor:
    """softmax(X X') X, all n x n scores at once: A = V = I."""
    return torch.softmax(X @ X.T, dim=-1) @ X


def tiled(X: Tensor) -> Tensor:
    velocity, points, _ = velocity_of(layer_of(PRESETS["clusters"], X.shape[1]), X)
    return velocity(points)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {"dense": dense, "tiled": tiled}


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform == "linux" else peak / 2**20


def one(name: str, n: int) -> float:
    """Peak memory of one evaluation in this process, beyond what was allocated before."""
    WAYS[name](tokens_of(PRESETS["clusters"], 100, 2, 0))
    X = tokens_of(PRESETS["clusters"], n, 2, 0)
    before = peak_mib()
    WAYS[name](X)
    return peak_mib() - before


def timings(n: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each way, interleaved: other load slows both alike."""
    X = tokens_of(PRESETS["clusters"], n, 2, 0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for round in range(ROUNDS + 1):
        for name, velocity in WAYS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            velocity(X)
            if round:  # the first warms up
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    assert (dense(X) - tiled(X)).abs().max() < 1e-12 * X.abs().max()
    return found


def to_the_end(n: int) -> dict[str, float | int | str]:
    """The whole flow, with its peak memory and its clusters."""
    X = tokens_of(PRESETS["clusters"], n, 2, 0)
    before, wall, cpu = peak_mib(), time.perf_counter(), time.process_time()
    flow = ls.dynamics.flow(
        layer_of(PRESETS["clusters"], 2), X, 10.0, frames=33, tol=1e-4, renormalise=True
    )
    clock = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    clusters = ls.dynamics.find_clusters(flow)
    return {
        "n": n,
        "steps": flow.steps,
        "evaluations": flow.evaluations,
        "status": flow.summary,
        "clusters": clusters.summary,
        "mib": peak_mib() - before,
        **clock,
    }


def child(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", choices=[*WAYS, "flow"])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "particles_cpu.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(to_the_end(args.n) if args.one == "flow" else one(args.one, args.n)))
        return
    sizes = ("--n", str(args.n), "--threads", str(args.threads))
    memory = {name: json.loads(child("--one", name, *sizes)) for name in WAYS}
    times = timings(args.n)
    rows = {}
    for name, runs in times.items():
        wall, cpu = (statistics.median(run[i] for run in runs) for i in (0, 1))
        rows[name] = {"wall_s": wall, "cpu_s": cpu, "mib": memory[name]}
        step = f"{STAGES * wall:.2f} s by the clock, {STAGES * cpu:.2f} s of the processor"
        print(f"{name}: a step of {STAGES} velocities takes {step}; {memory[name]:.0f} MiB")
    ratios = {key: rows["dense"][key] / rows["tiled"][key] for key in ("wall_s", "cpu_s")}
    pairs = [d[1] / t[1] for d, t in zip(times["dense"], times["tiled"], strict=True)]
    print(
        f"dense / tiled: {ratios['wall_s']:.2f} wall time, {ratios['cpu_s']:.2f} processor time"
        f" ({min(pairs):.2f} to {max(pairs):.2f} in {ROUNDS} pairs)"
    )
    end = json.loads(child("--one", "flow", *sizes))
    print(
        "to t = 10: {status}; {clusters}; {mib:.0f} MiB, {cpu_s:.0f} s of the processor".format(
            **end
        )
    )
    args.out.parent.mkdir(exist_ok=True)
    found = {
        "n": args.n,
        "threads": args.threads,
        "dtype": "float64",
        "ways": rows,
        "ratios": ratios,
        "flow": end,
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
