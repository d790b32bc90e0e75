"""Argument checks shared by several packages."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lipscope._types import UserError

if TYPE_CHECKING:
    import torch


P = ParamSpec("P")
T = TypeVar("T")


def _is_integer(x: object) -> bool:
    # 64 bits, as everything that counts, measures or seeds below has.
    return isinstance(x, Integral) and not isinstance(x, bool) and -(2**63) <= int(x) < 2**63


def _is_number(x: object) -> bool:
    if isinstance(x, Integral):
        return _is_integer(x)
    return isinstance(x, Real)


def _is_list_of(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    # Not isinstance(x, Sequence) alone: a string is a sequence of strings.
    return lambda x: (
        isinstance(x, Sequence) and not isinstance(x, str | bytes) and all(map(kind, x))
    )


def _is_named(name: str) -> Callable[[object], bool]:
    """Recognise instances of a class by its name, so that nothing is imported for it here."""
    return lambda x: any(kind.__name__ == name for kind in type(x).__mro__)


PLAIN: dict[str, tuple[str, Callable[[object], bool]]] = {
    "None": ("None", lambda x: x is None),
    "int": ("an integer", _is_integer),
    "float": ("a number", _is_number),
    "bool": ("True or False", lambda x: isinstance(x, bool)),
    "str": ("a string", lambda x: isinstance(x, str)),
    "Path": ("a path", lambda x: isinstance(x, os.PathLike)),
    "os.PathLike[str]": ("a path", lambda x: isinstance(x, os.PathLike)),
    "torch.device": ("a device", _is_named("device")),
    "torch.dtype": ("a dtype", _is_named("dtype")),
    "Map": ("a map of tokens", callable),
    "Measure": ("a DiscreteMeasure", _is_named("DiscreteMeasure")),
    "Progress": ("a function of (done, total)", callable),
    "Kernel": ("Dot(...) or L2(...)", lambda x: _is_named("Dot")(x) or _is_named("L2")(x)),
    "Domain": (
        "a domain such as Ball(R, n)",
        lambda x: any(_is_named(name)(x) for name in ("Point", "Ball", "Around", "Everywhere")),
    ),
    "Sequence[Study]": ("a list of studies", _is_list_of(_is_named("Study"))),
    "Sequence[int]": ("a list of integers", _is_list_of(_is_integer)),
    "Sequence[float]": ("a list of numbers", _is_list_of(_is_number)),
    "Sequence[str]": ("a list of strings", _is_list_of(lambda x: isinstance(x, str))),
}
"""Annotations that can be checked, each with its name in an error message."""

for _name in (
    *("Climb", "DiscreteMeasure", "LinearOperator", "Normed", "Rope", "SelfAttention", "Solver"),
    *("Study", "Tensor", "nn.Module"),
):
    PLAIN[_name] = (f"a {_name.removeprefix('nn.')}", _is_named(_name.removeprefix("nn.")))


def name_bad_argument(function: Callable[P, T]) -> Callable[P, T]:
    """Make a public function name the argument of a wrong type that it failed on.

    Python's own error comes from somewhere below and speaks of what is there. A call that works
    costs nothing more. Annotations that are not plain are left to the function itself.
    """

    @wraps(function)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            reason = bad_argument(function, args, kwargs, error)
            if reason is None:
                raise
            raise UserError(reason) from error

    return explaining


def bad_argument(
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: Exception,
) -> str | None:
    """Explain an error of a call by an argument of a wrong type, or by memory, if that fits."""
    if isinstance(error, UserError):
        return None
    annotations = {name: p.annotation for name, p in signature(function).parameters.items()}
    for name, value in (*zip(annotations, args, strict=False), *kwargs.items()):
        wrong = _wrong_type(name, value, annotations.get(name, "Any"))
        if wrong is not None:
            return wrong
        # A sparse tensor, or one on the device "meta", where there are only shapes.
        x: Any = value
        if _is_named("Tensor")(x) and (str(x.layout) != "torch.strided" or x.is_meta):
            return f"{name} must be a dense tensor with data"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "there is not enough memory for this; try smaller sizes"
    return None


def check_arguments(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Raise UserError for an argument that is not of the type annotated in `function`."""
    parameters = signature(function).parameters
    for name, value in given.items():
        if (wrong := _wrong_type(name, value, parameters[name].annotation)) is not None:
            raise UserError(wrong)


def check_fields(record: Any) -> None:
    """Raise UserError for a field of a dataclass that is not of the annotated type."""
    for field in fields(record):
        wrong = _wrong_type(field.name, getattr(record, field.name), field.type)
        if wrong is not None:
            raise UserError(wrong)


@cache
def _accepted(annotation: str) -> list[tuple[str, Callable[[object], bool]]] | None:
    """What an annotation such as "int | None" accepts; None if it is more than that."""
    parts = annotation.split(" | ")
    return [PLAIN[part] for part in parts] if PLAIN.keys() >= {*parts} else None


def _wrong_type(name: str, value: object, annotation: object) -> str | None:
    """Describe a value of the wrong type; return None if it has the annotated type."""
    named = getattr(annotation, "__name__", str(annotation))  # a class, or the text of the source
    kinds = _accepted(named)
    if kinds is None or any(accepts(value) for _, accepts in kinds):
        return None
    return f"{name} must be {' or '.join(words for words, _ in kinds)}, got {abbreviate(value)}"


def abbreviate(value: object) -> str:
    """A value in an error message: on one line, short, and without an error of its own."""
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to print the longest
        return "an integer of more than 64 bits"
    if _is_named("Tensor")(value):
        return f"a tensor of shape {tuple(getattr(value, 'shape', ()))}"
    try:
        text = re.sub(r"\s+", " ", repr(value))
    except Exception:  # an integer of 5,000 digits, an object whose repr fails
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_whole(name: str, value: Any, least: int, most: int = 2**63 - 1) -> None:
    """Raise unless `value` is an integer from `least` to `most`."""
    if not _is_integer(value) or not least <= value <= most:
        raise UserError(
            f"{name} must be a whole number from {least} to {most}, got {abbreviate(value)}"
        )


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite number above 0; `True` is a mistake here, not a 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{name} must be a positive number, got {value!r}")


def norm_name(norm: object, names: tuple[str, ...] = ("2", "inf")) -> str:
    """Return a norm as one of `names`; the numbers 2 and `math.inf` stand for "2" and "inf"."""
    name = norm
    if isinstance(norm, Real) and not isinstance(norm, bool):
        name = "2" if norm == 2 else "inf" if norm == math.inf else norm
    if not isinstance(name, str) or name not in names:
        raise UserError(f"norm must be {' or '.join(map(repr, names))}, got {norm!r}")
    return name


def usable_device(name: str) -> torch.device:
    """The device of this name, if it can hold a number and give it back."""
    import torch  # late: other checks serve code that never loads torch

    try:
        device = torch.device(name)
        torch.ones(1, device=device, dtype=torch.float64).sum().item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"device {name!r} cannot be used here ({reason}); try cpu") from error
    return device


def check_exponent(p: object) -> None:
    """Raise unless `p` can be the exponent of the distances W_p and d_p."""
    if isinstance(p, bool) or not isinstance(p, Real):
        raise UserError(
            f"p must be a number, at least 1 (math.inf for the longest move), got {p!r}"
        )
    if not float(p) >= 1:
        raise UserError(f"p must be at least 1 (math.inf for the longest move), got {p!r}")
