"""The maps that can be measured in a model, each with its formula; does not import torch.

X has one token per row; P_h(X) is the attention matrix of head h, including its mask, rotary
positions, soft cap and sinks. Whatever else the model computes on the way (gates, further norms) is
part of the map.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lipscope._types import UserError


@dataclass(frozen=True)
class Scope:
    """A map of tokens inside a model: its formula and a description.

    site:   "module:function" that builds a site, function(survey, layer) -> Site; with heads as a
            third argument if there is one map per head
    per:    "head", "layer" or "model": what there is one map of
    routed: whether the model must run on lipscope's attention
    last:   whether the map ends at the last hidden state
    """

    formula: str
    description: str
    site: str
    per: str = "layer"
    routed: bool = False
    last: bool = False


SCOPES = {
    "heads": Scope(
        "f_h(X) = P_h(X) (X V_h' + 1 b_h')",
        "each head alone, before the output projection, at the attention module's own input",
        "lipscope.models.sites:Survey.heads",
        per="head",
        routed=True,
    ),
    "attention": Scope(
        "f(X) = [f_1(X) ... f_H(X)] O' + 1 b'",
        "all heads with the output projection, at the attention module's own input, no residual",
        "lipscope.models.sites:Survey.attention",
        routed=True,
    ),
    "normed": Scope(
        "f(X) = Attention(Norm(X))",
        "attention after its normalisation, at the block's input, no residual (pre-norm models)",
        "lipscope.models.sites:Survey.normed",
        routed=True,
    ),
    "residual": Scope(
        "f(X) = X + Attention(Norm(X)) or Norm(X + Attention(X))",
        "the attention sub-layer as the model runs it, residual and normalisation in, "
        "at the block's input",
        "lipscope.models.sites:Survey.residual",
        routed=True,
    ),
    "block": Scope(
        "f(X) = Block(X)",
        "one block as the model runs it: attention, feed-forward, residuals and normalisations",
        "lipscope.models.sites:Survey.block",
    ),
    "suffix": Scope(
        "f(X) = Norm(Block_L( ... Block_k(X)))",
        "from the tokens that enter block k to the last hidden state",
        "lipscope.models.sites:Survey.suffix",
        last=True,
    ),
    "model": Scope(
        "f(X) = Norm(Block_L( ... Block_1(X)))",
        "from the embeddings, as they enter the first block, to the last hidden state",
        "lipscope.models.sites:Survey.model",
        per="model",
        last=True,
    ),
}

WITHOUT_ROUTE = tuple(name for name, scope in SCOPES.items() if not scope.routed)
"""The scopes available for a model that does not run on lipscope's attention."""


def per(scope: str) -> str:
    """What there is one map of; a scope that only another version has counts as one per layer."""
    return SCOPES[scope].per if scope in SCOPES else "layer"


def check_scope_names(names: Iterable[str]) -> None:
    """Raise UserError for a scope that does not exist."""
    for name in names:
        if name not in SCOPES:
            raise UserError(f"there is no scope {name!r}; the scopes are {', '.join(SCOPES)}")
