"""Measures the rounding of a map: every number it computes is moved by a few units in the last
place, at random.

How far the result moves is what rounding does to it, whatever the map is made of, as long as every
number that depends on the input passes through an operation of torch. What does not is found and
named: memory filled by a kernel that torch does not know of, operators of other libraries, numbers
that leave torch and come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipscope._files import on_one_line
from lipscope._torch_internals import (
    TorchDispatchMode,
    decomposed,
    is_pointwise,
    set_version,
    tree_map,
)
from lipscope.fused._torch_internals import kernel_watchers, unwrapped

DRAWS = 3
UNITS = 26
WIDENED = 2
"""Repetitions by which rounding is measured, the most units in the last place by which a number
moves, and the factor on the largest change that they show.

A number moves by 15 units in the root mean square, 30 with the factor. Single units would leave
the difference of two scores where it was in half of all draws; with 26, all three miss it in fewer
than one of 100,000.
"""

OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")
"""Namespaces whose operators are single operations; another one may hold whole programs."""

EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
CONSTANT = ("fill_", "zero_", "set_", "resize_")
"""Operators that change a tensor in place without computing anything."""

CANCELLING = ("gelu", "gelu_backward")
"""Operators that lose digits inside, 1 + erf(x) far below 0: their steps are moved one by one."""

PRODUCTS = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv")
"""Operators that multiply their last two tensors, and round in units of the terms they sum up."""

COPIES = ("_to_copy", "copy", "copy_", "clone")
"""Operators that lose no digits: weights in float32 are exact in float64."""

INACCURATE = ("polygamma", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0",
              "special_bessel_y1")  # fmt: skip
"""Operators of torch that are right to half of their digits only."""

EXITS = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.__dlpack__,
}
"""Functions that show the numbers of a tensor to other libraries."""

FAR = 0.01
"""Relative distance at which a number that depends on the input differs, also if it is rounded."""

FILLED = "memory that {name} reads was filled by a kernel outside torch, or by nothing"


class UnseenRoundingError(Exception):
    """Part of a map cannot be moved, so its rounding is not known; the message names the part."""


class RoundingNoise(TorchDispatchMode):
    """Moves every number that an operation computes by up to UNITS units in its last place.

    Numbers of the caller that the map changes in place are restored on exit, and are changed again
    when the mode is entered again.

    Args:
        seed: Seed of the directions; None to move nothing and only look.

    Attributes:
        outside: In a look, what an operation reads and none has computed, in order of first use:
            scalars, and the bits of weights, constants and whatever was computed outside torch.
        doubtful: Whether numbers may have left torch and come back.
    """

    def __init__(self, seed: int | None):
        super().__init__()
        self.seed = seed
        self.generators = dict[torch.device, torch.Generator]()
        self.computed = set[int]()  # storages of results
        self.moved = set[int]()  # of these, the ones that were not computed from nothing
        self.unwritten = dict[int, tuple[Tensor, bool]]()  # allocated; True: by a kernel of ours
        self.changed = dict[int, _Changed]()  # the caller's
        self.outside = list[Any]()
        self.bits = dict[int, tuple[Tensor, int]]()  # in a look: of each storage, kept alive
        self.doubtful = False
        self.exits = _Exits(self)

    def __enter__(self) -> Any:
        for changed in self.changed.values():
            changed.swap()
        kernel_watchers.append(self._await_kernel)
        self.exits.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.exits.__exit__(*error)
        kernel_watchers.remove(self._await_kernel)
        for changed in self.changed.values():
            changed.swap()

    def expect(self, x: Tensor) -> None:
        """Take x as given; its memory may once have been a result that is gone."""
        at = _storage(unwrapped(x))
        self.computed.discard(at)
        self.moved.discard(at)
        self.unwritten.pop(at, None)

    def check_nothing_left_torch(self, f: Callable[[Tensor], Any], X: Tensor) -> None:
        """Refuse a map, evaluated at X in this mode, that computes from its input outside torch."""
        if self.doubtful and _reads_other_numbers_elsewhere(f, X):
            raise UnseenRoundingError("numbers leave torch and come back, by .item() or .numpy()")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = _operator(func)
        name = operator.name
        leaves = _leaves(args, kwargs)
        given = [x for x in leaves if _rounds(x)]
        if operator.makes_view:  # of numbers that were moved when they were computed
            for x in given if name == "lift_fresh" else ():
                self.doubtful = True
                self.expect(x)
            return func(*args, **kwargs)
        if name in CANCELLING:
            super().__enter__()
            try:
                return decomposed(func)(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        written = operator.written(args, kwargs)
        read = [x for x in given if not any(x is w for w in written)] if written else given
        if operator.reads:
            self._check_read(func, read)
        if self.seed is None:
            self.outside += [repr(x) for x in leaves if isinstance(x, float)]
        elif operator.accumulates and not operator.multiplies:
            # Digits are lost inside of weights and constants, which have not moved yet.
            moved = {_place(x): self._moved(x) for x in read if _storage(x) not in self.moved}
            args, kwargs = tree_map(
                lambda x: x if any(x is w for w in written) else moved.get(_place(x), x),
                (args, kwargs),
            )
        for x in written:
            self._remember(x)
        out = func(*args, **kwargs)
        if "c10d" in func.namespace:  # an exchange fills memory that its schema does not name
            for x in given:
                self.unwritten.pop(_storage(x), None)
                self.bits.pop(_storage(x), None)
        if given and name == "_local_scalar_dense":
            self.doubtful = True
            self.outside.append(repr(out))
        if given and name not in CONSTANT:
            if func.namespace not in OWN and any(map(_rounds, [*written, *_leaves([out])])):
                raise UnseenRoundingError(
                    f"the operator {func.namespace}::{name} is not one of torch"
                )
            if name in INACCURATE:
                raise UnseenRoundingError(f"torch computes {name} to about half of its digits")
            size = None
            if operator.multiplies and self.seed is not None:
                size = _size_of_terms(read, kwargs.get("alpha", 1))
            for x in written:
                x.copy_(self._moved(x, size))
            if operator.makes_results:
                out = tree_map(partial(self._moved, size=size), out)
        for x in filter(_rounds, [*written, *_leaves([out])]):
            at = _storage(x)
            self.computed.add(at)
            if given and operator.reads:
                self.moved.add(at)
            else:  # where a result may have been that is gone
                self.moved.discard(at)
            self.unwritten.pop(at, None)
            if name in EMPTY:
                self.unwritten[at] = x, False
            if self.seed is None:
                self.bits[at] = x, _bits(x)
        return out

    def _check_read(self, func: Any, given: list[Tensor]) -> None:
        """Look at what an operation reads, before it runs."""
        for x in given:
            at = _storage(x)
            if at in self.unwritten and x.numel() and "c10d" not in func.namespace:
                _, by_us = self.unwritten.pop(at)
                if not by_us:
                    raise UnseenRoundingError(FILLED.format(name=func._opname))
                x.copy_(self._moved(x))
            elif self.seed is None and at not in self.bits:
                self.bits[at] = x, _bits(x)
                self.outside.append(self.bits[at][1])
            elif self.seed is None and at in self.computed and self.bits[at][1] != _bits(x):
                raise UnseenRoundingError(FILLED.format(name=func._opname))

    def _remember(self, x: Tensor) -> None:
        """Keep a copy of a tensor of the caller that is about to change."""
        at = _storage(x)
        if at not in self.computed and at not in self.unwritten and at not in self.changed:
            self.changed[at] = _Changed(x)

    def _await_kernel(self, x: Tensor) -> None:
        self.unwritten[_storage(x)] = x, True

    def _moved(self, x: Any, size: Tensor | None = None) -> Any:
        """Numbers moved by units in the last place of themselves, or of `size` if it is larger."""
        if self.seed is None or not _rounds(x):
            return x
        g = self.generators.setdefault(x.device, torch.Generator(x.device).manual_seed(self.seed))
        parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        most = UNITS * torch.finfo(x.dtype).eps
        move = torch.empty(parts.shape, dtype=torch.float32, device=x.device)
        move = move.uniform_(-most, most, generator=g).to(parts.dtype)
        if size is None and not x.is_complex():
            return x * move.add_(1)  # infinities stay
        largest = x.abs() if size is None else torch.maximum(size, x.abs())
        if not x.is_complex():
            return torch.addcmul(x, largest.nan_to_num_(posinf=0.0), move)
        # A product of complex numbers rounds by a unit of its modulus in either part.
        largest = torch.where(parts == 0, 0.0, largest[..., None])
        return torch.view_as_complex(torch.addcmul(parts, largest, move))


class _Changed:
    """Memory of the caller that a map writes: as it was, and as the map left it."""

    def __init__(self, x: Tensor):
        self.tensor = x
        self.version = x._version
        self.memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        self.other = self.memory.clone()

    def swap(self) -> None:
        """Exchange the two, with the version by which graphs know what they have saved."""
        version = self.tensor._version
        now = self.memory.clone()
        self.memory.copy_(self.other)
        set_version(self.tensor, self.version)
        self.version = version
        self.other = now


class _Exits(TorchFunctionMode):
    """Tells the mode of numbers that are shown to other libraries."""

    def __init__(self, mode: RoundingNoise):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXITS and _rounds(args[0]):
            self.mode.doubtful = True
        return func(*args, **(kwargs or {}))


def _reads_other_numbers_elsewhere(f: Callable[[Tensor], Any], X: Tensor) -> bool:
    """Whether what f reads from outside differs far from X: weights and constants do not."""
    g = torch.Generator().manual_seed(0)
    far = X + FAR * X.abs().max() * torch.randn(X.shape, generator=g, dtype=torch.float64).to(X)
    found = []
    for x in (X, far):
        with RoundingNoise(None) as mode:
            x = x.detach().clone().requires_grad_(torch.is_grad_enabled())
            mode.outside.clear()  # of the input itself
            try:
                f(x)
            except UnseenRoundingError:
                raise
            except Exception as error:  # whatever f raises
                raise UnseenRoundingError(
                    "numbers leave torch, and it fails where one could see whether they come "
                    f"back: {on_one_line(error)}"
                ) from error
        found.append(mode.outside)
    here, there = found
    return here != there


def _rounds(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _size_of_terms(read: list[Tensor], alpha: float) -> Tensor:
    """The root of the sum of squares of the terms in a product; 0 if it overflows."""
    left, right = (x.abs() if x.is_complex() else x for x in read[-2:])
    kind = torch.promote_types(left.dtype, torch.float32)
    size = (left.to(kind).square() @ right.to(kind).square()).sqrt_()
    return size.nan_to_num_(nan=0.0, posinf=0.0).mul_(abs(alpha)).to(left.dtype)


def _place(x: Any) -> Any:
    """Equal for tensors that show the same numbers."""
    return (_storage(x), x.storage_offset(), x.shape, x.stride()) if _rounds(x) else None


def _bits(x: Tensor) -> int:
    """The sum of all numbers in the memory of x, taken for integers."""
    kind = {2: torch.int16, 4: torch.int32}.get(x.element_size(), torch.int64)
    return int(torch.empty(0, dtype=kind, device=x.device).set_(x.untyped_storage()).sum())


@dataclass(frozen=True, slots=True)
class _Operator:
    """What the mode has to know of an operator.

    writes: position and name of each argument that it writes
    accumulates: whether it may sum up, so that digits of its terms are lost inside
    multiplies: whether it is one of PRODUCTS
    """

    name: str
    makes_view: bool
    makes_results: bool
    reads: bool
    accumulates: bool
    multiplies: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The numbers that it writes into its arguments."""
        values = [kwargs.get(name) if i >= len(args) else args[i] for i, name in self.writes]
        return [x for x in _leaves(values) if _rounds(x)]


@cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    name = func._opname
    aliases = [r.alias_info for r in schema.returns]
    return _Operator(
        name=name,
        makes_view=name == "_unsafe_view" or any(a and not a.is_write for a in aliases),
        makes_results=not any(aliases),
        reads=not (name.endswith("_like") or name.startswith("new_")),
        accumulates=(func.namespace == "aten" and not is_pointwise(func) and name not in COPIES),
        multiplies=name.rstrip("_") in PRODUCTS,
        writes=tuple(
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def _leaves(args: Iterable[Any], kwargs: Mapping[str, Any] = {}) -> list[Any]:
    """The arguments of an operator, of which some may be lists."""
    found: list[Any] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, list | tuple):
            found += x
        else:
            found.append(x)
    return found
