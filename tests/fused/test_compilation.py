"""The Triton kernels are compiled for a GPU, on machines that have none.

The interpreter runs them as Python, which lets through what the compiler refuses. A subprocess
compiles them: it tells Triton that a GPU is there, and launches nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.once import once

pytest.importorskip("triton")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATTERNS: dict[str, dict[str, Any]] = {
    "everything visible": {},
    "causal, window, padded": {"causal": True, "window": 50, "padded": True},
    "boolean mask": {"mask": torch.bool},
    "boolean mask of few tiles": {"mask": torch.bool, "few": True},
    "one row of a mask, causal": {"mask": torch.bool, "row": True, "causal": True},
    "additive mask": {"mask": torch.float32},
    "large heads that share keys": {"size": 128, "mask": torch.bool},
    "large heads, few tiles": {"size": 128, "mask": torch.bool, "few": True},
}
CASES = [(pattern, dtype) for pattern in PATTERNS for dtype in DTYPES]
QUICK = [(pattern, "bfloat16") for pattern in PATTERNS] + [
    ("additive mask", "float32"),
    ("boolean mask", "float16"),
]
"""Those that `make test` compiles; `make slow` compiles the others."""

ON_CHIP = 227 * 1024
"""Bytes of shared memory that a program may take on an H100 or H200."""

KERNELS = {
    "triton_forward": {"_forward", "_jvp", "_value_and_tangent"},
    "triton_backward": {
        "_onto_queries",
        "_onto_keys",
        "_second_onto_queries",
        "_second_onto_keys",
    },
    "triton_masks": {"_survey", "_list_tiles"},
}


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What failed among the cases that were selected, and the kernels compiled."""
    tests = [item for item in request.session.items if item.name.startswith("test_kernels_comp")]
    chosen = [list(item.callspec.params.values()) for item in tests] or QUICK

    def run(place: Path) -> None:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.fused.test_compilation",
                json.dumps(chosen),
                str(place),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return json.loads((once(tmp_path_factory, "kernels", run) / "found.json").read_text())


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_kernels_compile(compiled: dict[str, Any], pattern: str, dtype: str) -> None:
    assert compiled["failed"][f"{pattern}, {dtype}"] is None


@pytest.mark.wide
def test_every_kernel_is_among_them(compiled: dict[str, Any]) -> None:
    expected = {f"{file}.{name}" for file, names in KERNELS.items() for name in names}
    assert set(compiled["kernels"]) == expected


def why_not(case: str, dtype: torch.dtype) -> str | None:
    """What the compiler says against the kernels of a case, or None."""
    from lipscope.fused import triton_backward, triton_forward, triton_masks
    from lipscope.fused.pattern import Pattern

    options, n, mask = PATTERNS[case], 152, None
    triton_masks.FEW = 256 if options.get("few") else 0
    if "mask" in options:
        mask = torch.zeros(1, 1, 1 if options.get("row") else n, n).to(options["mask"])
    keys = torch.ones(1, n, dtype=torch.bool) if options.get("padded") else None
    causal, window = options.get("causal", False), options.get("window")
    pattern = Pattern(causal=causal, window=window, mask=mask, keys=keys)
    size = options.get("size", 64)
    q, dq, g, c = torch.zeros(4, 1, 2, n, size, dtype=dtype)
    k, v, dk, dv = torch.zeros(4, 1, 2 if size == 64 else 1, n, size, dtype=dtype)
    d = (dq, dk, dv)
    try:
        o, lse = triton_forward.forward(q, k, v, pattern)
        do, drift = triton_forward.jvp_and_drift(q, k, v, o, lse, d, pattern)
        triton_backward.vjp(q, k, v, o, lse, g, pattern)
        if triton_forward.supports_one_launch(q, pattern):
            for keep_digits in (True, False):
                triton_forward.value_and_tangent(q, k, v, d, pattern, keep_digits)
        if triton_backward.supports_both_vjp(q, v, pattern):
            triton_backward.both_vjp(q, k, v, d, g, c, o, do, lse, drift, pattern)
    except Exception as error:  # whatever the compiler raises
        return f"{type(error).__name__}: {error}"[:2000]
    return None


def pretend(names: set[str]) -> None:
    """From now on a launch compiles for an H100, adds the kernel's name, and ends there.

    What a program keeps on the chip has to fit.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        names.add(f"{self.fn.__module__.split('.')[-1]}.{self.__name__}")
        kernel = launch(self, *args, **options | {"warmup": True})
        assert kernel.metadata.shared <= ON_CHIP, f"{self.__name__} takes {kernel.metadata.shared}"
        return kernel

    driver.set_active(Driver())
    JITFunction.run = run


if __name__ == "__main__":
    torch.set_num_threads(1)
    names: set[str] = set()
    pretend(names)
    wanted = json.loads(sys.argv[1])
    failed = {f"{case}, {dtype}": why_not(case, DTYPES[dtype]) for case, dtype in wanted}
    (Path(sys.argv[2]) / "found.json").write_text(
        json.dumps({"failed": failed, "kernels": sorted(names)})
    )
