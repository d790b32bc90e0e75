"""True float64: run models with hard-coded float32 casts in float64 from end to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

REDUCED = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
PRODUCTS = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.mm,
    Tensor.mm,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
    torch.einsum,
    torch.nn.functional.linear,
)


class Float64(TorchFunctionMode):
    """While this mode is active, float64 tensors stay float64.

    RMSNorm, softmax and rotary tables explicitly cast to float32, so `model.double()` alone leaves
    seven digits. Integers still become float32 where the model says so (T5 sorts its distances into
    buckets in that dtype); products of mixed dtypes are promoted.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func in CASTS:
                return args[0]
            args = [
                torch.float64 if isinstance(a, torch.dtype) and a in REDUCED else a for a in args
            ]
            if kwargs.get("dtype") in REDUCED:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*(_promoted(args) if func in PRODUCTS else args), **kwargs)


def _promoted(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments, all in float64 if any of them is."""
    if not any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args):
        return args
    return [a.double() if isinstance(a, Tensor) and a.dtype in REDUCED else a for a in args]
