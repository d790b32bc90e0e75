"""lipscope: how smooth is attention? The local Lipschitz constant of Transformers, with
certificates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

__version__ = "0.1.0"

_CONTENTS = {
    "Around": "_types",
    "AttackPlan": "probes.attack",
    "Ball": "_types",
    "BatchEstimate": "linalg.estimate",
    "Dot": "attention.scores",
    "Estimate": "linalg.estimate",
    "Everywhere": "_types",
    "L2": "attention.scores",
    "LinearOperator": "linalg.operator",
    "Model": "models.model",
    "Normed": "attack.search",
    "Point": "_types",
    "Rope": "attention.scores",
    "SelfAttention": "attention.layer",
    "SmoothnessMonitor": "train.monitor",
    "SmoothnessWarning": "train.monitor",
    "Solver": "linalg.spectral",
    "Status": "_types",
    "Study": "study.study",
    "UserError": "_types",
    "attack": "",
    "attack_model": "probes.attack",
    "attend": "fused.primitive",
    "attend_everywhere": "fused.drop_in",
    "audit_model": "probes.bounds",
    "bounds": "theorems.registry",
    "check_run": "probes.budget.comparing",
    "merge": "study.study",
    "convert_model": "train.convert",
    "dynamics": "",
    "error_budget": "probes.budget.prediction",
    "jacobian": "linalg.differentiate",
    "lightning_callback": "train.callbacks",
    "load": "models.loading",
    "local_lipschitz": "linalg.local",
    "mean_field": "",
    "measure": "study.run",
    "nn": "",
    "write_report": "report.page",
    "reproduce_papers": "papers.running",
    "scaled_dot_product_attention": "fused.drop_in",
    "simulate": "dynamics.simulation",
    "singular_triplets": "linalg.triplets",
    "spectral_norm": "linalg.spectral",
    "theorems": "",
    "trainer_callback": "train.callbacks",
    "watch": "train.watched_models",
}

__getattr__, __dir__ = contents(__name__, _CONTENTS)
__all__ = [
    "L2",
    "Around",
    "AttackPlan",
    "Ball",
    "BatchEstimate",
    "Dot",
    "Estimate",
    "Everywhere",
    "LinearOperator",
    "Model",
    "Normed",
    "Point",
    "Rope",
    "SelfAttention",
    "SmoothnessMonitor",
    "SmoothnessWarning",
    "Solver",
    "Status",
    "Study",
    "UserError",
    "attack",
    "attack_model",
    "attend",
    "attend_everywhere",
    "audit_model",
    "bounds",
    "check_run",
    "convert_model",
    "dynamics",
    "error_budget",
    "jacobian",
    "lightning_callback",
    "load",
    "local_lipschitz",
    "mean_field",
    "measure",
    "merge",
    "nn",
    "reproduce_papers",
    "scaled_dot_product_attention",
    "simulate",
    "singular_triplets",
    "spectral_norm",
    "theorems",
    "trainer_callback",
    "watch",
    "write_report",
]

if TYPE_CHECKING:
    from lipscope import attack as attack
    from lipscope import dynamics as dynamics
    from lipscope import mean_field as mean_field
    from lipscope import nn as nn
    from lipscope import theorems as theorems
    from lipscope._types import Around as Around
    from lipscope._types import Ball as Ball
    from lipscope._types import Everywhere as Everywhere
    from lipscope._types import Point as Point
    from lipscope._types import Status as Status
    from lipscope._types import UserError as UserError
    from lipscope.attack.search import Normed as Normed
    from lipscope.attention.layer import SelfAttention as SelfAttention
    from lipscope.attention.scores import L2 as L2
    from lipscope.attention.scores import Dot as Dot
    from lipscope.attention.scores import Rope as Rope
    from lipscope.dynamics.simulation import simulate as simulate
    from lipscope.fused.drop_in import attend_everywhere as attend_everywhere
    from lipscope.fused.drop_in import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from lipscope.fused.primitive import attend as attend
    from lipscope.linalg.differentiate import jacobian as jacobian
    from lipscope.linalg.estimate import BatchEstimate as BatchEstimate
    from lipscope.linalg.estimate import Estimate as Estimate
    from lipscope.linalg.local import local_lipschitz as local_lipschitz
    from lipscope.linalg.operator import LinearOperator as LinearOperator
    from lipscope.linalg.spectral import Solver as Solver
    from lipscope.linalg.spectral import spectral_norm as spectral_norm
    from lipscope.linalg.triplets import singular_triplets as singular_triplets
    from lipscope.models.loading import load as load
    from lipscope.models.model import Model as Model
    from lipscope.papers.running import reproduce_papers as reproduce_papers
    from lipscope.probes.attack import AttackPlan as AttackPlan
    from lipscope.probes.attack import attack_model as attack_model
    from lipscope.probes.bounds import audit_model as audit_model
    from lipscope.probes.budget.comparing import check_run as check_run
    from lipscope.probes.budget.prediction import error_budget as error_budget
    from lipscope.report.page import write_report as write_report
    from lipscope.study.run import measure as measure
    from lipscope.study.study import Study as Study
    from lipscope.study.study import merge as merge
    from lipscope.theorems.registry import bounds as bounds
    from lipscope.train.callbacks import lightning_callback as lightning_callback
    from lipscope.train.callbacks import trainer_callback as trainer_callback
    from lipscope.train.convert import convert_model as convert_model
    from lipscope.train.monitor import SmoothnessMonitor as SmoothnessMonitor
    from lipscope.train.monitor import SmoothnessWarning as SmoothnessWarning
    from lipscope.train.watched_models import watch as watch
