"""Results in a console and in a notebook: shapes in place of tensors, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from functools import wraps
from html import escape
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

MANY = 6
"""Numbers and entries beyond this are counted, not shown."""


class Displayed:
    """Base of dataclasses that hold tensors: a short repr, and a table in notebooks.

    A class with a property `summary` shows that sentence; any other shows its fields, without
    those that have their default value.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `dataclass` writes a repr of its own unless the class itself has one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Displayed.__repr__  # type: ignore[method-assign]  # as meant

    def _facts(self) -> Iterator[tuple[str, object]]:
        """Names and values of what is shown."""
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            same = value is default or (not hasattr(value, "shape") and value == default)
            if field.repr and (default is MISSING or not same):
                yield field.name, value

    def __repr__(self) -> str:
        name = type(self).__name__
        summary = getattr(self, "summary", None)
        if isinstance(summary, str):
            return f"{name}: {summary}"
        return f"{name}({', '.join(f'{key}={short(value)}' for key, value in self._facts())})"

    def _repr_html_(self) -> str:
        name = type(self).__name__
        summary = getattr(self, "summary", None)
        rows = ((key, short(value)) for key, value in self._facts())
        said = f": {escape(summary)}" if isinstance(summary, str) else ""
        return f"<div><p><strong>{name}</strong>{said}</p>{html_table((), rows)}</div>"


def short(value: Any) -> str:
    """A value in a few words: a tensor by its dtype and shape, a long list by its length."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        place = str(getattr(value, "device", "cpu"))
        # Numbers elsewhere than on the CPU are left there: to show them would wait for the device.
        short_list = len(value.shape) <= 1 and hasattr(value, "numel") and value.numel() <= MANY
        if short_list and place == "cpu":
            return short(value.tolist())
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)}" + ("" if place == "cpu" else f" on {place}")
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key!r}: {short(entry)}" for key, entry in value.items())
        return f"{{{inside}}}" if len(value) <= MANY else f"{len(value)} entries"
    # A record, such as a NamedTuple, has a repr of its own.
    named = hasattr(value, "_fields") or hasattr(value, "_repr_html_")
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and not named:
        inside = ", ".join(map(short, value))
        return f"[{inside}]" if len(value) <= MANY else f"{len(value)} entries"
    return repr(value)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, without lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table for notebooks, everything escaped; without a head, rows begin with a name."""

    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    top = f"<thead>{line(head, 'th')}</thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def with_bar(doing: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that takes `progress`: in a notebook, None means a bar."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            # A Jupyter kernel; IPython in a terminal has a shell without one.
            shell = sys.modules.get("IPython")
            in_notebook = shell is not None and hasattr(shell.get_ipython(), "kernel")
            if kwargs.get("progress") is not None or not in_notebook:
                return function(*args, **kwargs)
            from tqdm.auto import tqdm

            form = "{desc} {percentage:.0f} % {bar} {remaining} left"
            with tqdm(desc=doing, total=1.0, leave=False, bar_format=form) as bar:

                def show(done: float, total: float) -> None:
                    if total:
                        bar.update(done / total - bar.n)

                # cast: mypy does not know that the function has an argument `progress`.
                return cast(Any, function)(*args, **{**kwargs, "progress": show})

        return run

    return decorate
