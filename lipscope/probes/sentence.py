"""Run a model on token embeddings: hidden states and mean-pooled sentence embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.models.capture import RecordedCall
from lipscope.models.maps import run_to
from lipscope.models.model import Model

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
