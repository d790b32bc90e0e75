"""The limit of infinitely many layers: flows of tokens, clusters, Gaussians, growth with depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

_CONTENTS = {
    "find_clusters": "clusters",
    "flow": "particles",
    "gaussian_flow": "gaussian",
    "growth_along_depth": "depth_growth",
    "layered": "particles",
    "simulate": "simulation",
}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = ["find_clusters", "flow", "gaussian_flow", "growth_along_depth", "layered", "simulate"]

if TYPE_CHECKING:
    from lipscope.dynamics.clusters import find_clusters as find_clusters
    from lipscope.dynamics.depth_growth import growth_along_depth as growth_along_depth
    from lipscope.dynamics.gaussian import gaussian_flow as gaussian_flow
    from lipscope.dynamics.particles import flow as flow
    from lipscope.dynamics.particles import layered as layered
    from lipscope.dynamics.simulation import simulate as simulate
