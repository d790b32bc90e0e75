"""lipscope: how smooth is attention? The local Lipschitz constant of Transformers, with certificates."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_CONTENTS = {
    "Around": "lipscope._types",
    "Ball": "lipscope._types",
    "Climb": "lipscope.attack.ascent",
    "ContractiveL2Attention": "lipscope.nn.l2_attention",
    "CosineSelfAttention": "lipscope.nn.cosine_attention",
    "Dot": "lipscope.attention.kernels",
    "DotSelfAttention": "lipscope.nn.dot_attention",
    "Estimate": "lipscope.linalg.estimate",
    "Everywhere": "lipscope._types",
    "InvertibleResidual": "lipscope.nn.invertible",
    "L2": "lipscope.attention.kernels",
    "L2SelfAttention": "lipscope.nn.l2_attention",
    "LinearOperator": "lipscope.linalg.operator",
    "Measure": "lipscope.mean_field.measures",
    "Model": "lipscope.models.model",
    "Normed": "lipscope.attack.regions",
    "Point": "lipscope._types",
    "Rope": "lipscope.attention.kernels",
    "SelfAttention": "lipscope.attention.layer",
    "SmoothnessMonitor": "lipscope.nn.monitor",
    "SmoothnessWarning": "lipscope.nn.monitor",
    "Solver": "lipscope.linalg.spectral",
    "Status": "lipscope._types",
    "Study": "lipscope.study.study",
    "UserError": "lipscope._types",
    "ascend": "lipscope.attack.ascent",
    "attack_model": "lipscope.study.attack_run",
    "attend": "lipscope.attention.primitive",
    "audit": "lipscope.study.bound_probe",
    "bounds": "lipscope.theorems.registry",
    "compare_attacks": "lipscope.study.attack_comparison",
    "conditional_distance": "lipscope.mean_field.masked",
    "convert": "lipscope.models.conversion",
    "explicit_inputs": "lipscope.attack.constructions",
    "find_clusters": "lipscope.dynamics.clusters",
    "flow": "lipscope.dynamics.particles",
    "gaussian_flow": "lipscope.dynamics.gaussian",
    "growth_along_depth": "lipscope.dynamics.depth_growth",
    "jacobian": "lipscope.linalg.differentiate",
    "jasmin": "lipscope.nn.regularize",
    "largest_gain": "lipscope.mean_field.splitting_maps",
    "layered": "lipscope.dynamics.particles",
    "lightning_callback": "lipscope.models.callbacks",
    "load": "lipscope.models.loading",
    "local_lipschitz": "lipscope.mean_field.local",
    "measure": "lipscope.study.run",
    "measured_sigma": "lipscope.nn.regularize",
    "push": "lipscope.mean_field.attention_on_measures",
    "render": "lipscope.report.page",
    "simulate": "lipscope.dynamics.simulation",
    "singular_response": "lipscope.attack.direction",
    "singular_triplets": "lipscope.linalg.local",
    "spectral_norm": "lipscope.linalg.spectral",
    "splitting": "lipscope.mean_field.duplication",
    "splitting_map": "lipscope.mean_field.splitting_maps",
    "trainer_callback": "lipscope.models.callbacks",
    "transition": "lipscope.mean_field.dirac_families",
    "two_diracs": "lipscope.mean_field.dirac_families",
    "wasserstein": "lipscope.mean_field.transport",
    "watch": "lipscope.models.watching",
}

__all__ = ["__version__", *_CONTENTS]

if TYPE_CHECKING:
    from lipscope._types import Around as Around
    from lipscope._types import Ball as Ball
    from lipscope._types import Everywhere as Everywhere
    from lipscope._types import Point as Point
    from lipscope._types import Status as Status
    from lipscope._types import UserError as UserError
    from lipscope.attack.ascent import Climb as Climb
    from lipscope.attack.ascent import ascend as ascend
    from lipscope.attack.constructions import explicit_inputs as explicit_inputs
    from lipscope.attack.direction import singular_response as singular_response
    from lipscope.attack.regions import Normed as Normed
    from lipscope.attention.kernels import L2 as L2
    from lipscope.attention.kernels import Dot as Dot
    from lipscope.attention.kernels import Rope as Rope
    from lipscope.attention.layer import SelfAttention as SelfAttention
    from lipscope.attention.primitive import attend as attend
    from lipscope.dynamics.clusters import find_clusters as find_clusters
    from lipscope.dynamics.depth_growth import growth_along_depth as growth_along_depth
    from lipscope.dynamics.gaussian import gaussian_flow as gaussian_flow
    from lipscope.dynamics.particles import flow as flow
    from lipscope.dynamics.particles import layered as layered
    from lipscope.dynamics.simulation import simulate as simulate
    from lipscope.linalg.differentiate import jacobian as jacobian
    from lipscope.linalg.estimate import Estimate as Estimate
    from lipscope.linalg.local import singular_triplets as singular_triplets
    from lipscope.linalg.operator import LinearOperator as LinearOperator
    from lipscope.linalg.spectral import Solver as Solver
    from lipscope.linalg.spectral import spectral_norm as spectral_norm
    from lipscope.mean_field.attention_on_measures import push as push
    from lipscope.mean_field.dirac_families import transition as transition
    from lipscope.mean_field.dirac_families import two_diracs as two_diracs
    from lipscope.mean_field.duplication import splitting as splitting
    from lipscope.mean_field.local import local_lipschitz as local_lipschitz
    from lipscope.mean_field.masked import conditional_distance as conditional_distance
    from lipscope.mean_field.measures import Measure as Measure
    from lipscope.mean_field.splitting_maps import largest_gain as largest_gain
    from lipscope.mean_field.splitting_maps import splitting_map as splitting_map
    from lipscope.mean_field.transport import wasserstein as wasserstein
    from lipscope.models.callbacks import lightning_callback as lightning_callback
    from lipscope.models.callbacks import trainer_callback as trainer_callback
    from lipscope.models.conversion import convert as convert
    from lipscope.models.loading import load as load
    from lipscope.models.model import Model as Model
    from lipscope.models.watching import watch as watch
    from lipscope.nn.cosine_attention import CosineSelfAttention as CosineSelfAttention
    from lipscope.nn.dot_attention import DotSelfAttention as DotSelfAttention
    from lipscope.nn.invertible import InvertibleResidual as InvertibleResidual
    from lipscope.nn.l2_attention import ContractiveL2Attention as ContractiveL2Attention
    from lipscope.nn.l2_attention import L2SelfAttention as L2SelfAttention
    from lipscope.nn.monitor import SmoothnessMonitor as SmoothnessMonitor
    from lipscope.nn.monitor import SmoothnessWarning as SmoothnessWarning
    from lipscope.nn.regularize import jasmin as jasmin
    from lipscope.nn.regularize import measured_sigma as measured_sigma
    from lipscope.report.page import render as render
    from lipscope.study.attack_comparison import compare_attacks as compare_attacks
    from lipscope.study.attack_run import attack_model as attack_model
    from lipscope.study.bound_probe import audit as audit
    from lipscope.study.run import measure as measure
    from lipscope.study.study import Study as Study
    from lipscope.theorems.registry import bounds as bounds


def __getattr__(name: str) -> object:
    if name not in _CONTENTS:
        raise AttributeError(f"module 'lipscope' has no attribute {name!r}")
    return getattr(import_module(_CONTENTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_CONTENTS])
