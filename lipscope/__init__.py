"""lipscope: how smooth is attention? The local Lipschitz constant of Transformers, with certificates."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_CONTENTS = {
    "Dot": "lipscope.attention.kernels",
    "Estimate": "lipscope.linalg.estimate",
    "L2": "lipscope.attention.kernels",
    "LinearOperator": "lipscope.linalg.operator",
    "Rope": "lipscope.attention.kernels",
    "SelfAttention": "lipscope.attention.layer",
    "Solver": "lipscope.linalg.spectral",
    "Status": "lipscope._types",
    "UserError": "lipscope._types",
    "attend": "lipscope.attention.primitive",
    "jacobian": "lipscope.linalg.differentiate",
    "local_lipschitz": "lipscope.linalg.local",
    "singular_triplets": "lipscope.linalg.local",
    "spectral_norm": "lipscope.linalg.spectral",
}

__all__ = ["__version__", *_CONTENTS]

if TYPE_CHECKING:
    from lipscope._types import Status as Status
    from lipscope._types import UserError as UserError
    from lipscope.attention.kernels import L2 as L2
    from lipscope.attention.kernels import Dot as Dot
    from lipscope.attention.kernels import Rope as Rope
    from lipscope.attention.layer import SelfAttention as SelfAttention
    from lipscope.attention.primitive import attend as attend
    from lipscope.linalg.differentiate import jacobian as jacobian
    from lipscope.linalg.estimate import Estimate as Estimate
    from lipscope.linalg.local import local_lipschitz as local_lipschitz
    from lipscope.linalg.local import singular_triplets as singular_triplets
    from lipscope.linalg.operator import LinearOperator as LinearOperator
    from lipscope.linalg.spectral import Solver as Solver
    from lipscope.linalg.spectral import spectral_norm as spectral_norm


def __getattr__(name: str) -> object:
    if name not in _CONTENTS:
        raise AttributeError(f"module 'lipscope' has no attribute {name!r}")
    return getattr(import_module(_CONTENTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_CONTENTS])
