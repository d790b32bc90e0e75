"""lipscope: how smooth is attention? The local Lipschitz constant of Transformers, with
certificates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipscope._contents import contents

__version__ = "0.1.0"

_MODULES = {
    "": "attack dynamics mean_field nn theorems",
    "_types": "Around Ball Everywhere Point Status UserError",
    "attack.search": "Normed",
    "attention.layer": "SelfAttention",
    "attention.scores": "Dot L2 Rope",
    "dynamics.simulation": "simulate",
    "fused.drop_in": "attend_everywhere scaled_dot_product_attention",
    "fused.primitive": "attend",
    "linalg.differentiate": "jacobian",
    "linalg.estimate": "BatchEstimate Estimate",
    "linalg.local": "local_lipschitz",
    "linalg.operator": "LinearOperator",
    "linalg.spectral": "Solver spectral_norm",
    "linalg.triplets": "singular_triplets",
    "models.loading": "load",
    "models.model": "Model",
    "papers.running": "reproduce_papers",
    "probes.attack": "AttackPlan attack_model",
    "probes.bounds": "audit_model",
    "probes.budget.comparing": "check_run",
    "probes.budget.prediction": "error_budget",
    "report.page": "write_report",
    "study.run": "measure",
    "study.study": "Study merge",
    "theorems.registry": "bounds",
    "train.callbacks": "lightning_callback trainer_callback",
    "train.convert": "convert_model",
    "train.monitor": "SmoothnessMonitor SmoothnessWarning",
    "train.watched_models": "watch",
}
"""Public names by the module that defines them; subpackages first."""

_CONTENTS = {name: module for module, names in _MODULES.items() for name in names.split()}

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
    from lipscope import attack, dynamics, mean_field, nn, theorems
    from lipscope._types import Around, Ball, Everywhere, Point, Status, UserError
    from lipscope.attack.search import Normed
    from lipscope.attention.layer import SelfAttention
    from lipscope.attention.scores import L2, Dot, Rope
    from lipscope.dynamics.simulation import simulate
    from lipscope.fused.drop_in import attend_everywhere, scaled_dot_product_attention
    from lipscope.fused.primitive import attend
    from lipscope.linalg.differentiate import jacobian
    from lipscope.linalg.estimate import BatchEstimate, Estimate
    from lipscope.linalg.local import local_lipschitz
    from lipscope.linalg.operator import LinearOperator
    from lipscope.linalg.spectral import Solver, spectral_norm
    from lipscope.linalg.triplets import singular_triplets
    from lipscope.models.loading import load
    from lipscope.models.model import Model
    from lipscope.papers.running import reproduce_papers
    from lipscope.probes.attack import AttackPlan, attack_model
    from lipscope.probes.bounds import audit_model
    from lipscope.probes.budget.comparing import check_run
    from lipscope.probes.budget.prediction import error_budget
    from lipscope.report.page import write_report
    from lipscope.study.run import measure
    from lipscope.study.study import Study, merge
    from lipscope.theorems.registry import bounds
    from lipscope.train.callbacks import lightning_callback, trainer_callback
    from lipscope.train.convert import convert_model
    from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
    from lipscope.train.watched_models import watch
