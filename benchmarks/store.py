"""The store at 100,000 rows: seconds to write them, and for `lipscope show` and `export`.

    python benchmarks/store.py [ROWS]

Each command runs in an interpreter of its own, best of three; the target is 2 s each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lipscope.study.records import (
    Description,
    Fingerprint,
    Row,
    SampleTokens,
    Sensitivity,
    StudyHeader,
)
from lipscope.study.store import Store

HEADS, LAYERS, LENGTHS = 20, 25, (8, 16, 32, 64, 128)

INFO = StudyHeader(
    Fingerprint("w", "c", "", "t", "x", False, "float64", "none", 1e-6, 0, 1),
    Description(
        "a model",
        "Model",
        LAYERS,
        HEADS,
        "cpu",
        "a text",
        1000,
        {"heads": "each head"},
        0.0,
        1.0,
        {},
        "",
    ),
)


def write(place: Path, rows: int) -> int:
    """A study of about `rows` rows, one transaction per layer, length and sample; their number."""
    samples = max(1, rows // (HEADS * LAYERS * len(LENGTHS)))
    store, jobs = Store.create(place, INFO), 0
    store.write_samples(
        SampleTokens(n, sample, tuple(f"t{i}" for i in range(n)))
        for n in LENGTHS
        for sample in range(samples)
    )
    for n in LENGTHS:
        norms = (n**-0.5,) * n
        for sample in range(samples):
            for layer in range(LAYERS):
                job = [row(layer, head, n, sample) for head in range(HEADS)]
                store.write(
                    job, [Sensitivity("heads", layer, r.head, n, sample, norms, norms) for r in job]
                )
                jobs += 1
    store.close()
    return jobs


def row(layer: int, head: int, n: int, sample: int) -> Row:
    sigma = (1 + layer) * n**0.25 + head / 97 + sample / 1009
    bounds = (sigma, sigma * (1 - 1e-12), sigma * 1.01)
    return Row(
        "sigma",
        "heads",
        layer,
        head,
        n,
        sample,
        "local",
        "2",
        *bounds,
        1e-7,
        "converged",
        3.0,
        "float64",
        "cpu",
        0.01,
    )


def seconds(*command: str) -> float:
    words = [sys.executable, "-m", "lipscope", *command]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "study"
        began = time.perf_counter()
        jobs = write(place, rows)
        wrote = time.perf_counter() - began
        size = sum(path.stat().st_size for path in place.iterdir()) / 2**20
        print(
            f"write        {wrote:7.2f} s   {jobs} transactions, {1e3 * wrote / jobs:.2f} ms each, "
            f"{size:.0f} MiB"
        )
        for command in ("show", "export"):
            best = min(seconds(command, str(place)) for _ in range(3))
            print(f"{command:<12} {best:7.2f} s   {'within' if best < 2 else 'OVER'} 2 s")


if __name__ == "__main__":
    main()
