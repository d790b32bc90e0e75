"""Attention on probability measures: infinitely many tokens, transport, mass splitting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

_CONTENTS = {
    "DiscreteMeasure": "measures",
    "conditional_distance": "transport",
    "derivative": "measures",
    "largest_gain": "duplication",
    "push": "measures",
    "splitting": "duplication",
    "splitting_map": "duplication",
    "transition": "dirac_families",
    "two_diracs": "dirac_families",
    "wasserstein": "transport",
}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = [
    "DiscreteMeasure",
    "conditional_distance",
    "derivative",
    "largest_gain",
    "push",
    "splitting",
    "splitting_map",
    "transition",
    "two_diracs",
    "wasserstein",
]

if TYPE_CHECKING:
    from lipscope.mean_field.dirac_families import transition as transition
    from lipscope.mean_field.dirac_families import two_diracs as two_diracs
    from lipscope.mean_field.duplication import largest_gain as largest_gain
    from lipscope.mean_field.duplication import splitting as splitting
    from lipscope.mean_field.duplication import splitting_map as splitting_map
    from lipscope.mean_field.measures import DiscreteMeasure as DiscreteMeasure
    from lipscope.mean_field.measures import derivative as derivative
    from lipscope.mean_field.measures import push as push
    from lipscope.mean_field.transport import conditional_distance as conditional_distance
    from lipscope.mean_field.transport import wasserstein as wasserstein
