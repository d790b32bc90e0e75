"""Bounds on the Lipschitz constant of attention: one file per paper, and one table of them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

_CONTENTS = {
    "Bound": "statement",
    "BoundRow": "registry",
    "BoundRows": "registry",
    "FactoredAttention": "factored_values",
    "REGISTRY": "registry",
    "bounds": "registry",
    "network_bound": "composition",
}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = [
    "REGISTRY",
    "Bound",
    "BoundRow",
    "BoundRows",
    "FactoredAttention",
    "bounds",
    "network_bound",
]

if TYPE_CHECKING:
    from lipscope.attention.layer import FactoredAttention as FactoredAttention
    from lipscope.theorems.composition import network_bound as network_bound
    from lipscope.theorems.registry import REGISTRY as REGISTRY
    from lipscope.theorems.registry import BoundRow as BoundRow
    from lipscope.theorems.registry import BoundRows as BoundRows
    from lipscope.theorems.registry import bounds as bounds
    from lipscope.theorems.statement import Bound as Bound
