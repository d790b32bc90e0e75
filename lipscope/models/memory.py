"""What was found out about a module, remembered for as long as its weights stay the same."""

from __future__ import annotations

from typing import Any

from torch import nn


class Memory:
    """Findings by module; those about weights that have changed since are forgotten."""

    def __init__(self) -> None:
        self._findings: dict[nn.Module, tuple[tuple[tuple[int, int], ...], Any]] = {}

    def get(self, module: nn.Module) -> Any:
        """The finding, or None."""
        weights, finding = self._findings.get(module, ((), None))
        return finding if weights == _mark(module) else None

    def keep(self, module: nn.Module, finding: Any) -> None:
        self._findings[module] = _mark(module), finding


def _mark(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Where every weight lies, and how often it was written to."""
    return tuple((p.data_ptr(), p._version) for p in module.parameters())
