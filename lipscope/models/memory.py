"""Findings about a module, remembered as long as its weights do not change."""

from __future__ import annotations

from typing import Any

from torch import nn


class Memory:
    """Findings by module; a finding expires when the weights of its module change."""

    def __init__(self) -> None:
        self._findings: dict[nn.Module, tuple[tuple[tuple[int, int], ...], Any]] = {}

    def get(self, module: nn.Module) -> Any:
        """The finding about a module, or None."""
        weights, finding = self._findings.get(module, ((), None))
        return finding if weights == _mark(module) else None

    def keep(self, module: nn.Module, finding: Any) -> None:
        self._findings[module] = _mark(module), finding


def _mark(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Address and version of every weight; an in-place update changes only the version."""
    return tuple((p.data_ptr(), p._version) for p in module.parameters())
