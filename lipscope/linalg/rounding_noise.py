"""Measures the rounding of a map: every number it computes is moved by a few units in the last
place, at random.

How far the result moves is what rounding does to it, whatever the map is made of, as long as every
number that depends on the input passes through an operation of torch. What does not is found and
named: memory filled by a kernel that torch does not know of, operators of other libraries, numbers
that leave torch and come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipscope._torch_internals import TorchDispatchMode, kernel_watchers, tree_leaves, tree_map

DRAWS, UNITS, WIDENED = 3, 26, 2
"""Repetitions by which rounding is measured, the most units in the last place by which a number
moves, and the factor on the largest change that they show.

A number moves by 15 units in the root mean square, 30 with the factor. Single units would leave
the difference of two scores where it was in half of all draws; with 26, all three miss it in fewer
than one of 100,000.
"""

OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")
"""Namespaces whose operators are single operations; those of others may be whole programs."""

EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
CONSTANT = ("fill_", "zero_", "set_", "resize_")
"""Operators that change a tensor in place without computing anything."""


class UnseenRoundingError(Exception):
    """Part of a map cannot be moved, so its rounding is not known; the message names the part."""


class RoundingNoise(TorchDispatchMode):
    """Moves every number that an operation computes by up to UNITS units in its last place.

    Numbers of the caller that the map changes in place are restored on exit.

    Args:
        seed: Seed of the directions; None to move nothing and only look.

    Attributes:
        outside: Numbers that an operation reads and none has computed, in order of first use:
            weights, constants, and whatever was computed outside torch.
        doubtful: Whether numbers may have left torch and come back.
    """

    def __init__(self, seed: int | None):
        super().__init__()
        self.seed = seed
        self.generators = dict[torch.device, torch.Generator]()
        self.computed = set[int]()  # storages of results
        self.unwritten = dict[int, bool]()  # only allocated; True if a kernel of ours will fill it
        self.changed = dict[int, tuple[Tensor, Tensor]]()  # the caller's, as they were
        self.outside = dict[int, Tensor | float]()
        self.doubtful = False

    def __enter__(self) -> Any:
        kernel_watchers.append(self._await_kernel)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        kernel_watchers.remove(self._await_kernel)
        for x, before in self.changed.values():
            x.copy_(before)
        self.changed.clear()

    def check_nothing_left_torch(self, f: Callable[[Tensor], Any], X: Tensor) -> None:
        """Refuse a map, evaluated at X in this mode, that computes from its input outside torch."""
        if self.doubtful and _reads_other_numbers_elsewhere(f, X):
            raise UnseenRoundingError("numbers leave torch and come back, by .item() or .numpy()")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, name = func._schema, func._opname
        given = [x for x in tree_leaves((args, kwargs)) if _rounds(x)]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if view:  # of numbers that were moved when they were computed
            for x in given if name == "lift_fresh" else ():
                self.doubtful = True
                self.computed.discard(_storage(x))  # of results that are gone
                self.unwritten.pop(_storage(x), None)
                self.outside[_storage(x)] = x
            return func(*args, **kwargs)
        written = _written(schema, args, kwargs) if schema.is_mutable else []
        if not (name.endswith("_like") or name.startswith("new_")):  # these read no numbers
            self._check_read(func, [x for x in given if not any(x is w for w in written)])
        for x in written:
            self._remember(x)
        out = func(*args, **kwargs)
        if "c10d" in func.namespace:  # an exchange fills memory that its schema does not name
            for x in given:
                self.unwritten.pop(_storage(x), None)
        if given and name == "_local_scalar_dense":
            self.doubtful = True
            self.outside[-len(self.outside) - 1] = out
        if given and name not in CONSTANT:
            if func.namespace not in OWN and any(map(_rounds, [*written, *tree_leaves(out)])):
                raise UnseenRoundingError(
                    f"the operator {func.namespace}::{name} is not one of torch"
                )
            for x in written:
                x.copy_(self._moved(x))
            if not any(r.alias_info for r in schema.returns):
                out = tree_map(self._moved, out)
        for x in filter(_rounds, [*written, *tree_leaves(out)]):
            self.computed.add(_storage(x))
            self.unwritten.pop(_storage(x), None)
            if name in EMPTY:
                self.unwritten[_storage(x)] = False
        return out

    def _check_read(self, func: Any, given: list[Tensor]) -> None:
        """Look at what an operation reads, before it runs."""
        for x in given:
            at = _storage(x)
            if at in self.unwritten and x.numel() and "c10d" not in func.namespace:
                if not self.unwritten.pop(at):
                    raise UnseenRoundingError(
                        f"memory that {func._opname} reads was filled by a kernel outside torch, "
                        "or by nothing"
                    )
                x.copy_(self._moved(x))
            elif at not in self.computed:
                self.outside.setdefault(at, x)

    def _remember(self, x: Tensor) -> None:
        """Keep a copy of a tensor of the caller that is about to change."""
        at = _storage(x)
        if at not in self.computed and at not in self.unwritten and at not in self.changed:
            whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
            self.changed[at] = whole, whole.clone()

    def _await_kernel(self, x: Tensor) -> None:
        self.unwritten[_storage(x)] = True

    def _moved(self, x: Any) -> Any:
        if self.seed is None or not _rounds(x):
            return x
        g = self.generators.setdefault(x.device, torch.Generator(x.device).manual_seed(self.seed))
        parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        move = torch.rand(parts.shape, generator=g, dtype=torch.float32, device=x.device) * 2 - 1
        move = (move * (UNITS * torch.finfo(x.dtype).eps)).to(parts.dtype)
        if not x.is_complex():
            return x * (1 + move)
        # A product of complex numbers rounds by a unit of its modulus in either part.
        size = torch.where(parts == 0, 0.0, x.abs()[..., None])
        return torch.view_as_complex(parts + move * size)


def _reads_other_numbers_elsewhere(f: Callable[[Tensor], Any], X: Tensor) -> bool:
    """Whether what f reads from outside differs far from X: weights and constants do not."""
    g = torch.Generator().manual_seed(0)
    far = X + 0.01 * X.abs().max() * torch.randn(X.shape, generator=g, dtype=torch.float64).to(X)
    found = []
    for x in (X, far):
        x = x.detach().clone()
        with torch.no_grad(), RoundingNoise(None) as mode:
            mode.computed.add(_storage(x))
            f(x)
        found.append(list(mode.outside.values()))
    here, there = found
    return len(here) != len(there) or not all(map(_same, here, there))


def _same(a: Tensor | float, b: Tensor | float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or bool(a == b)
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return _storage(a) == _storage(b) or (same_kind and torch.equal(a, b))


def _rounds(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _written(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The numbers that an operation writes into its arguments."""
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            found += [x for x in tree_leaves(value) if _rounds(x)]
    return found
