"""A worker compares the model it loads with the one that the study is of, before its first job."""

from dataclasses import replace

import pytest
import torch
from transformers import BertModel

from lipscope._types import UserError
from lipscope.models.loading import load
from lipscope.study.reading import Windows
from lipscope.study.work import NUMERIC_VERSION, config_digest, start_sigma_work
from tests.study.fakes import IDENTITY
from tests.study.tiny import save_tiny

INPUTS = Windows((), (), 0, 0, "")


@pytest.fixture
def identity(model):
    return replace(IDENTITY, config=config_digest(model), numeric_version=NUMERIC_VERSION)


def test_the_same_model_is_accepted_with_the_threads_of_the_worker(model, identity):
    work = start_sigma_work(model.card, INPUTS, identity, 3)
    assert work.model.card == model.card and work.identity == identity and work.threads == 3


def test_other_weights_configurations_and_versions_are_refused(model, identity):
    with pytest.raises(UserError, match="the worker has other weights of"):
        start_sigma_work(replace(model.card, weights="0" * 64), INPUTS, identity, 1)
    with pytest.raises(UserError, match="the worker has another configuration of"):
        start_sigma_work(model.card, INPUTS, replace(identity, config="0" * 64), 1)
    with pytest.raises(UserError, match="another version of lipscope; install the same"):
        start_sigma_work(model.card, INPUTS, replace(identity, numeric_version=0), 1)


def test_a_living_worker_loads_weights_that_were_rewritten_in_place(tmp_path, identity):
    """A worker keeps its model between studies; the name of the folder does not identify it."""
    folder = save_tiny(tmp_path / "model", layers=1)
    cards = []
    for scale in (1.0, 2.0, 1.0):
        rewritten = BertModel.from_pretrained(folder)
        with torch.no_grad():
            rewritten.embeddings.word_embeddings.weight.mul_(scale)
        rewritten.save_pretrained(folder)
        now = load(folder)
        identity = replace(identity, config=config_digest(now))
        work = start_sigma_work(now.card, INPUTS, identity, 1)
        again = start_sigma_work(now.card, INPUTS, identity, 1)
        expected = now.trunk.embeddings.word_embeddings.weight
        assert torch.equal(work.model.trunk.embeddings.word_embeddings.weight, expected)
        assert again.model is work.model
        cards.append(now.card)
    assert cards[0].weights != cards[1].weights
    # The folder now has the second weights again: a study of the first ones must not use them.
    with pytest.raises(UserError, match="the worker has other weights of"):
        start_sigma_work(cards[0], INPUTS, identity, 1)
