"""Objectives for attacks on a text: sigma of a layer, or the change of the model's output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.attack.ascent import sigma_gradient
from lipscope.attack.tokens import TextTarget
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.estimate import BatchEstimate, as_batch
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models.capture import RecordedCall, Tap
from lipscope.models.maps import run_to
from lipscope.models.model import Model
from lipscope.models.sites import Site, Survey

AT_ONCE = 16
"""Number of texts per forward pass."""


class TextReader:
    """The model as a map of the embeddings of n tokens, framed by fixed special tokens.

    Positions are added inside the model, so a gradient with respect to the embeddings sees them.
    """

    def __init__(self, model: Model, n: int, before: Sequence[int] = (), after: Sequence[int] = ()):
        self.rows = token_rows(model)
        first = torch.zeros(n, dtype=torch.long).tolist()
        # The survey runs the preflight for this length and gives the runner that runs the model.
        self._runner = model.survey([[*before, *first, *after]]).runner
        self._before, self._after = (
            self.rows[torch.tensor(list(ids), dtype=torch.long)] for ids in (before, after)
        )

    def hidden(self, E: Tensor) -> Tensor:
        """Embeddings [B, n, d] -> last hidden states [B, n and the special tokens, d]."""
        ends = (self._before.expand(len(E), -1, -1), self._after.expand(len(E), -1, -1))
        e = torch.cat([ends[0], E, ends[1]], dim=1)
        return run_to(self._runner, self._runner.trunk, RecordedCall((), {"inputs_embeds": e}))

    def hidden_of(self, ids: Tensor) -> Tensor:
        """Token ids [B, n] -> last hidden states, in batches of AT_ONCE."""
        with torch.no_grad():
            return torch.cat([self.hidden(self.rows[part]) for part in ids.split(AT_ONCE)])


def sentence_embedding(hidden: Tensor) -> Tensor:
    """The mean over tokens, normalised: [B, n, d] -> [B, d]."""
    # A mean of zero has no direction: clamped, it stays zero instead of becoming NaN.
    mean = hidden.mean(dim=1).double()
    return mean / mean.norm(dim=1, keepdim=True).clamp_min(1e-300)


def token_rows(model: Model) -> Tensor:
    """The embedding of each token id, before positions are added."""
    embedding = model.trunk.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        raise UserError(
            f"{model.card.name} has no table of token embeddings, so its text cannot be attacked"
        )
    return embedding.weight.detach().to(model.dtype)


def layer_sigma(model: Model, layer: int, *, tol: float = 1e-2, seed: int = 0) -> TextTarget:
    """sigma of attention at a layer, as a function of the text through all layers below.

    The error of a well-separated sigma is about the square of `tol`: enough to rank texts, whose
    sigma is then measured again.
    """
    model.check_layers([layer], model.card.name)
    rows = token_rows(model)
    solver = Solver(seed=seed)

    def solve(survey: Survey) -> tuple[Site, BatchEstimate]:
        site = survey.site("attention", layer)
        return site, as_batch(local_lipschitz(site.f, site.X, tol, solver=solver))

    def measure(ids: Tensor) -> Tensor:
        return torch.cat([solve(model.survey(part))[1].value for part in ids.split(AT_ONCE)])

    def slope(E: Tensor) -> tuple[float, Tensor]:
        survey = model.survey(inputs_embeds=E[None])
        site, top = solve(survey)
        there = sigma_gradient(site.f, site.X, top.left, top.right)
        core = survey.layers[layer].core
        assert core is not None
        # Two chain-rule steps instead of one graph through the solver: sigma's gradient at X has a
        # closed form in its singular vectors, and autograd carries it from X to the embeddings.
        e = E.detach().clone()[None].requires_grad_(True)
        call = RecordedCall((), {"inputs_embeds": e})
        with torch.enable_grad():
            X = run_to(survey.runner, survey.runner.trunk, call, Tap(core, "input"))
            (gradient,) = torch.autograd.grad(X, e, there)
        return top.value[0].item(), gradient[0]

    return TextTarget(measure, slope, rows, _words(model, len(rows)))


def output_change(
    model: Model,
    ids: Sequence[int],
    *,
    reader: TextReader | None = None,
    tol: float = 1e-2,
    seed: int = 0,
) -> TextTarget:
    """||F(text) - F(ids)||_F, where F is the last hidden state.

    At `ids` itself this is 0 and has no gradient, so the top singular direction of D F is used
    instead: the direction in which a small step changes the output most. `reader` may add special
    tokens around the text.
    """
    reader = reader or TextReader(model, len(ids))
    solver = Solver(seed=seed)
    rows = reader.rows
    text = torch.tensor(list(ids))
    start = rows[text]
    origin = reader.hidden_of(text[None])

    def measure(texts: Tensor) -> Tensor:
        return (reader.hidden_of(texts) - origin).norm(dim=(1, 2)).double()

    def slope(E: Tensor) -> tuple[float, Tensor]:
        if torch.equal(E, start):  # the norm is not differentiable at 0
            top = as_batch(spectral_norm(jacobian(reader.hidden, E[None]), tol, solver=solver))
            return 0.0, top.value[0].item() * top.right[0]
        e = E.detach().clone()[None].requires_grad_(True)
        with torch.enable_grad():
            change = (reader.hidden(e) - origin).norm()
            (gradient,) = torch.autograd.grad(change, e)
        return change.item(), gradient[0]

    return TextTarget(measure, slope, rows, _words(model, len(rows)))


def _words(model: Model, size: int) -> Tensor | None:
    """The ids that represent text: neither special tokens nor reserved entries."""
    if model.tokenizer is None:
        return None
    names = model.tokenizer.convert_ids_to_tokens(range(min(size, len(model.tokenizer))))
    special = set(model.tokenizer.all_special_ids)
    return torch.tensor(
        [i for i, name in enumerate(names) if i not in special and not name.startswith("[unused")]
    )
