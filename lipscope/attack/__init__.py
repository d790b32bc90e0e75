"""Inputs that make the local Lipschitz constant large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

_CONTENTS = {
    "Climb": "ascent",
    "Found": "search",
    "ascend": "ascent",
    "explicit_inputs": "constructions",
    "singular_response": "perturbation",
}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = ["Climb", "Found", "ascend", "explicit_inputs", "singular_response"]

if TYPE_CHECKING:
    from lipscope.attack.ascent import Climb as Climb
    from lipscope.attack.ascent import ascend as ascend
    from lipscope.attack.constructions import explicit_inputs as explicit_inputs
    from lipscope.attack.perturbation import singular_response as singular_response
    from lipscope.attack.search import Found as Found
