"""What is measured at a site, besides sigma: bounds, attacks and numerical error."""

from __future__ import annotations

from lipscope._contents import contents

PROBES = {
    "Attack": "attack",
    "Bounds": "bounds",
}
"""The probes that `lipscope.study.run.run` calls at the sites of a model, and their files."""

__getattr__, __dir__ = contents(__name__, PROBES)
