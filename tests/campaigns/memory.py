"""Does memory grow from call to call? Public calls repeated, with what Python and the system hold.

    python -m tests.campaigns.memory 1000          # calls of each kind; slow ones a tenth of them
    python -m tests.campaigns.memory 1200 audit    # 120 calls of the kind with this in its name

Printed at ten moments: the memory blocks that Python's allocator has given out, which a leaked
object would raise for ever, and the resident memory, before and after free pages are returned to
the system. Blocks that stay while resident memory grows and levels off are fragmentation.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import lipscope as ls
from tests.study.tiny import PROSE, save_tiny

PAGE = 4096
MOMENTS = 10


def resident() -> float:
    """MiB of physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def trimmed() -> float:
    """The same after free pages have gone back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def calls(place: Path) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, a divisor of the number of calls, and the call."""
    torch.manual_seed(0)
    f = ls.SelfAttention(*torch.randn(3, 16, 8, dtype=torch.float64), heads=2)
    X = torch.randn(12, 8, dtype=torch.float64)
    yield "local_lipschitz", 1, lambda: ls.local_lipschitz(f, X)
    yield "local_lipschitz of a function", 10, lambda: ls.local_lipschitz(lambda Z: f(Z), X)
    yield "bounds on a ball", 1, lambda: ls.bounds(f, ls.Ball(2.0, 12))
    yield "bounds around an input", 10, lambda: ls.bounds(f, ls.Around(X, 0.1))
    save_tiny(place / "tiny", layers=2)
    model = ls.load(str(place / "tiny"))
    yield "measure", 10, lambda: ls.measure(model, PROSE, lengths=[6, 9], samples=1)
    climb = ls.attack.Climb(steps=1, restarts=1)
    yield (
        "audit_model (lipscope bounds)",
        10,
        lambda: ls.audit_model(model, PROSE, lengths=[4], layers=[0], radius=3.0, climb=climb),
    )


def blocks() -> int:
    """Memory blocks in use by Python objects."""
    gc.collect()
    return sys.getallocatedblocks()


def growth(call: Callable[[], object], count: int) -> list[tuple[int, int, float, float]]:
    """Number of calls, blocks, resident memory before and after trimming, at ten moments."""
    found = []
    for i in range(count + 1):
        if i % max(1, count // MOMENTS) == 0:
            held = blocks()
            found.append((i, held, resident(), trimmed()))
        call()
    return found


def main(count: int, kind: str = "") -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for name, share, call in calls(Path(scratch)):
            if kind not in name:
                continue
            cold = resident()
            for _ in range(3):
                call()  # imports, caches
            print(f"{name}: + {resident() - cold:.1f} MiB in the first three calls")
            print(f"{'calls':>8}{'blocks':>12}{'MiB':>10}{'trimmed':>10}")
            for i, held, before, after in growth(call, max(MOMENTS, count // share)):
                print(f"{i:8}{held:12}{before:10.1f}{after:10.1f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, *sys.argv[2:3])
