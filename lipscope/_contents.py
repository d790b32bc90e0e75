"""Contents pages of packages: public names that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def contents(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package with lazily imported public names.

    Args:
        package: Full name of the package.
        table: Maps each public name to the module that defines it, or to "" for a subpackage.
    """

    def get(name: str) -> object:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not table[name]:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(f"{package}.{table[name]}"), name)
        setattr(sys.modules[package], name, value)  # so that this is asked once
        return value

    return get, lambda: sorted(table)
