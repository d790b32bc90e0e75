"""Sigma of one layer of a model as a function of its text: measured on token ids, differentiated in embeddings."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.attack.ascent import sigma_gradient
from lipscope.attack.tokens import TextTarget
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver
from lipscope.models.model import Model
from lipscope.models.running import Call, Tap, run_to
from lipscope.models.sites import Survey

AT_ONCE = 16
"""Texts measured in one batch."""


def layer_sigma(model: Model, layer: int, *, tol: float = 1e-2, seed: int = 0) -> TextTarget:
    """sigma of attention at a layer, with positions and the layers below it in the loop.

    The error of a well separated sigma is about the square of tol: enough to rank texts, to be measured again after.
    """
    if not 0 <= layer < model.layers:
        raise UserError(f"layer {layer} does not exist: {model.card.name} has layers 0 to {model.layers - 1}.")
    embedding = model.trunk.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    rows = embedding.weight.detach().to(model.dtype)
    solver = Solver(seed=seed)

    def measure(ids: Tensor) -> Tensor:
        return torch.cat([_sigma(model.survey(part), layer, tol, solver) for part in ids.split(AT_ONCE)])

    return TextTarget(measure, partial(_slope, model, layer, tol, solver), rows, _words(model, len(rows)))


def _sigma(survey: Survey, layer: int, tol: float, solver: Solver) -> Tensor:
    site = survey.site("attention", layer)
    return local_lipschitz(site.f, site.X, tol, solver=solver).value


def _slope(model: Model, layer: int, tol: float, solver: Solver, E: Tensor) -> tuple[float, Tensor]:
    """The gradient at the layer's input, pulled back through everything below it."""
    survey = model.survey(inputs_embeds=E[None])
    site = survey.site("attention", layer)
    top = local_lipschitz(site.f, site.X, tol, solver=solver)
    there = sigma_gradient(site.f, site.X, top.left, top.right)
    core = survey.layers[layer].core
    assert core is not None
    e = E.detach().clone()[None].requires_grad_(True)
    with torch.enable_grad():
        X = run_to(survey.host, survey.host.trunk, Call((), {"inputs_embeds": e}, e), Tap(core, "input"))
        (gradient,) = torch.autograd.grad(X, e, there)
    return top.value[0].item(), gradient[0]


def _words(model: Model, size: int) -> Tensor | None:
    """The ids that stand for text: neither special tokens nor places kept free."""
    if model.tokenizer is None:
        return None
    names = model.tokenizer.convert_ids_to_tokens(range(min(size, len(model.tokenizer))))
    special = set(model.tokenizer.all_special_ids)
    return torch.tensor([i for i, name in enumerate(names) if i not in special and not name.startswith("[unused")])
