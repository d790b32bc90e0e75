"""What tests/fused/test_torchs_samples.py looks at: torch's test samples for its attention.

    python -m tests.fused.torchs_samples FILE

The samples (OpInfo) are a private part of the wheel. Importing them freezes torch.backends for the
rest of the process, hence a process of their own.
"""

from __future__ import annotations

import json
import sys
import types
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipscope as ls
from lipscope.fused import drop_in

NAME, MISSING = "nn.functional.scaled_dot_product_attention", 3
HALF, ALL = (
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
torchs_own = torch.nn.functional.scaled_dot_product_attention
routed = 0


def attention(*args: Any, **options: Any) -> Tensor:
    """torch's attention as a program would call it, under attend_everywhere."""
    with ls.attend_everywhere():
        return torch.nn.functional.scaled_dot_product_attention(*args, **options)


def written_out(*args: Any, **options: Any) -> Tensor:
    """torch's attention in operations that torch can differentiate in both modes."""
    with sdpa_kernel(SDPBackend.MATH):
        return torchs_own(*args, **options)


class Sample:
    """Queries, keys and values of torch's, with options whose mask is a constant."""

    def __init__(self, sample: Any):
        self.inputs = tuple(x.detach() for x in (sample.input, *sample.args))
        self.options = {
            name: x.detach() if isinstance(x, Tensor) else x for name, x in sample.kwargs.items()
        }

    def to(self, *where: Any) -> Sample:
        moved = object.__new__(Sample)
        moved.inputs = tuple(x.to(*where) for x in self.inputs)
        moved.options = {
            name: x.to(*where) if isinstance(x, Tensor) else x for name, x in self.options.items()
        }
        return moved

    def value(self, function: Callable[..., Tensor]) -> Tensor:
        return function(*self.inputs, **self.options)

    def map(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: function(*inputs, **self.options)

    def tangent(self, function: Callable[..., Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        moved = [
            torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in self.inputs
        ]
        # Rounded first, so that every dtype is asked for the derivative in the same direction.
        moved = [x.bfloat16().to(self.inputs[0]) for x in moved]
        return torch.func.jvp(self.map(function), self.inputs, tuple(moved))[1]

    def tolerance(self) -> float:
        """Rounding of the result and, through the exponential, of the scores."""
        q, k = self.inputs[0].double(), self.inputs[1].double()
        largest = float((q @ k.mT).abs().max()) / q.shape[-1] ** 0.5
        dtype = self.inputs[0].dtype
        scores = torch.finfo(torch.float32 if dtype in HALF else dtype).eps
        return 4 * (torch.finfo(dtype).eps + scores * (1 + largest))


def close(found: Tensor, expected: Tensor, sample: Sample) -> None:
    assert found.dtype == sample.inputs[0].dtype and found.shape == expected.shape
    error = float((found.double() - expected).norm() / expected.norm())
    assert error <= sample.tolerance(), f"relative error {error:.1e}, {sample.tolerance():.1e}"


def forward(sample: Sample) -> None:
    close(sample.value(attention), sample.to(torch.float64).value(written_out), sample)


def jvp(sample: Sample) -> None:
    close(sample.tangent(attention), sample.to(torch.float64).tangent(written_out), sample)


def derivatives(check: Callable[..., bool], **options: Any) -> Callable[[Sample], None]:
    def test(sample: Sample) -> None:
        inputs = tuple(x.clone().requires_grad_() for x in sample.inputs)
        assert check(sample.map(attention), inputs, fast_mode=True, **options)

    return test


def autocast(sample: Sample) -> None:
    for dtype in HALF:
        with torch.autocast("cpu", dtype):
            found, expected = sample.value(attention), sample.value(torchs_own)
        assert found.dtype == expected.dtype, f"{found.dtype} in place of {expected.dtype}"
        cast = sample if found.dtype == torch.float64 else sample.to(dtype)
        close(found, cast.to(torch.float64).value(written_out), cast)


def meta(sample: Sample) -> None:
    there = sample.to("meta")
    found, expected = there.value(attention), there.value(torchs_own)
    assert (found.device, found.dtype, found.shape) == (
        expected.device,
        expected.dtype,
        expected.shape,
    )


def refused(sample: Sample) -> None:
    try:
        sample.value(attention)
    except RuntimeError as error:
        assert isinstance(error, ls.UserError) and "dropout_p must be 0" in str(error)
    else:
        raise AssertionError("dropout was not refused")


CHECKS: dict[str, tuple[Callable[[Sample], None], tuple[torch.dtype, ...]]] = {
    "forward": (forward, ALL),
    "jvp": (jvp, ALL),
    "gradcheck": (derivatives(gradcheck, check_forward_ad=True), (torch.float64,)),
    "gradgradcheck": (derivatives(gradgradcheck, check_fwd_over_rev=True), (torch.float64,)),
    "autocast": (autocast, ALL),
    "meta": (meta, ALL),
    "dropout": (refused, (torch.float64,)),
}


def load() -> Any:
    """torch's description of its attention, which draws the samples."""
    if find_spec("expecttest") is None:  # a dependency of torch's test cases, not of their samples
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        print(f"this torch has no test samples: {error}", file=sys.stderr)
        sys.exit(MISSING)
    found = [info for info in op_db if info.name == NAME]
    if not found:
        print(f"torch's test samples have none of {NAME}", file=sys.stderr)
        sys.exit(MISSING)
    return found[0]


def count_calls() -> None:
    """Count the calls that arrive in lipscope's attention."""
    inner = drop_in.attend_by_rules

    def counted(*args: Any) -> Tensor:
        global routed
        routed += 1
        return inner(*args)

    drop_in.attend_by_rules = counted


def outcome(check: Callable[[Sample], None], given: list[Sample]) -> dict[str, Any]:
    before, failed = routed, []
    for number, sample in enumerate(given):
        try:
            check(sample)
        except Exception as error:  # whatever it is, it is reported
            failed.append(f"sample {number}: {type(error).__name__}: {error}"[:300])
    return {"samples": len(given), "routed": routed - before, "failed": failed}


def main(place: str) -> None:
    torch.set_num_threads(1)
    info = load()
    torch.manual_seed(0)
    drawn = {
        dtype: [Sample(x) for x in info.sample_inputs("cpu", dtype, requires_grad=False)]
        for dtype in ALL
    }
    count_calls()
    report = {}
    for name, (check, dtypes) in CHECKS.items():
        for dtype in dtypes:
            wanted = [x for x in drawn[dtype] if bool(x.options["dropout_p"]) == (check is refused)]
            report[f"{name}, {str(dtype)[6:]}"] = outcome(check, wanted)
    Path(place).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
