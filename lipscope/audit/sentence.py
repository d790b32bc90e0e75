"""A text as a model reads it: token embeddings in, hidden states and the mean-pooled sentence embedding out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope._types import UserError
from lipscope.models.model import Model
from lipscope.models.running import Call, run_to

AT_ONCE = 16
"""Texts that pass through the model in one batch."""


class TextReader:
    """Everything a model does to n tokens after their embedding, the same special tokens before and after them.

    Positions are added inside the model, so they are in the loop of whoever moves the embeddings.
    """

    def __init__(self, model: Model, n: int, before: Sequence[int] = (), after: Sequence[int] = ()):
        self.rows = token_rows(model)
        first = torch.zeros(n, dtype=torch.long).tolist()
        self._host = model.survey([[*before, *first, *after]]).host
        self._before, self._after = (
            self.rows[torch.tensor(list(ids), dtype=torch.long)] for ids in (before, after)
        )

    def hidden(self, E: Tensor) -> Tensor:
        """Embeddings [B, n, d] -> last hidden states [B, n and the special tokens, d]."""
        ends = (self._before.expand(len(E), -1, -1), self._after.expand(len(E), -1, -1))
        e = torch.cat([ends[0], E, ends[1]], dim=1)
        return run_to(self._host, self._host.trunk, Call((), {"inputs_embeds": e}, e))

    def hidden_of(self, ids: Tensor) -> Tensor:
        """Token ids [B, n] -> last hidden states, a few texts at a time."""
        with torch.no_grad():
            return torch.cat([self.hidden(self.rows[part]) for part in ids.split(AT_ONCE)])


def sentence_embedding(hidden: Tensor) -> Tensor:
    """The mean over tokens, of length 1: [B, n, d] -> [B, d]."""
    mean = hidden.mean(dim=1).double()
    return mean / mean.norm(dim=1, keepdim=True).clamp_min(1e-300)


def token_rows(model: Model) -> Tensor:
    """The rows that stand for token ids, before positions are added."""
    embedding = model.trunk.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        raise UserError(
            f"{model.card.name} has no table of token embeddings, so its text cannot be attacked."
        )
    return embedding.weight.detach().to(model.dtype)
