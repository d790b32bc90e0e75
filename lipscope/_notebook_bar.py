"""A progress bar in notebooks, for calls that take minutes and were given no `progress`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

OFTEN = 0.2
"""Seconds between two updates of a bar."""


def with_bar(doing: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that takes `progress`: in a notebook, None means a bar."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if kwargs.get("progress") is not None or not in_notebook():
                return function(*args, **kwargs)
            bar = Bar(doing)
            try:
                # cast: mypy does not know that the function has an argument `progress`.
                return cast(Any, function)(*args, **{**kwargs, "progress": bar})
            finally:
                bar.remove()

        return run

    return decorate


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, which shows HTML; a terminal is not one."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


class Bar:
    """A bar in the output of the current cell; it needs no widgets, and leaves nothing behind."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.start = time.monotonic()
        self.last = 0.0
        self._handle: Any = None

    def __call__(self, done: float, total: float) -> None:
        """Show how much is done; called too often, it does nothing."""
        now = time.monotonic()
        if now - self.last < OFTEN or not 0 <= done < total:
            return
        self.last = now
        left = f" {_clock((now - self.start) * (total - done) / done)} left" if done else ""
        words = f"{100 * done / total:.0f} %{left}"
        bar = f"<progress value='{done:g}' max='{total:g}'></progress>"
        self._show(f"<div>{self.doing} {bar} {words}</div>", f"{self.doing} {words}")

    def remove(self) -> None:
        """Empty the output that held the bar."""
        if self._handle is not None:
            self._show("", "")

    def _show(self, html: str, text: str) -> None:
        from IPython.display import display

        shown = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
