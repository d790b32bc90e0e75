"""Contents pages of packages: names that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def contents(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """__getattr__ and __dir__ of a package whose public names are the keys of `table`.

    A value is the module that holds the name, "" where the name is a package itself.
    """

    def get(name: str) -> object:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not table[name]:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{table[name]}"), name)

    return get, lambda: sorted(table)
