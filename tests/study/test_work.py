"""A worker compares the model it loads with the one that the study is of, before its first job."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import BertModel

import lipscope as ls
from lipscope._types import UserError
from lipscope.models.loading import load
from lipscope.models.sites import Site
from lipscope.study.probe import NUMERIC_VERSION, Place, Sigma, config_digest, start_probes
from lipscope.study.reading import SampledText
from lipscope.study.records import Row
from tests.naive import dense_jacobian
from tests.study.fakes import IDENTITY
from tests.study.tiny import save_tiny

INPUTS = SampledText((), (), 0, 0, "")
PROBES = {"sigma": Sigma(("attention",))}


@pytest.fixture
def identity(model):
    return replace(IDENTITY, config=config_digest(model), numeric_version=NUMERIC_VERSION)


def test_the_same_model_is_accepted_with_the_threads_of_the_worker(model, identity):
    work = start_probes(model.card, INPUTS, identity, PROBES, 3)
    assert work.model.card == model.card and work.probes == PROBES and work.threads == 3


def test_other_weights_configurations_and_versions_are_refused(model, identity):
    with pytest.raises(UserError, match="the worker has other weights of"):
        start_probes(replace(model.card, weights="0" * 64), INPUTS, identity, PROBES, 1)
    with pytest.raises(UserError, match="the worker has another configuration of"):
        start_probes(model.card, INPUTS, replace(identity, config="0" * 64), PROBES, 1)
    with pytest.raises(UserError, match="another version of lipscope; install the same"):
        start_probes(model.card, INPUTS, replace(identity, numeric_version=0), PROBES, 1)


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
        work = start_probes(now.card, INPUTS, identity, PROBES, 1)
        again = start_probes(now.card, INPUTS, identity, PROBES, 1)
        expected = now.trunk.embeddings.word_embeddings.weight
        assert torch.equal(work.model.trunk.embeddings.word_embeddings.weight, expected)
        assert again.model is work.model
        cards.append(now.card)
    assert cards[0].weights != cards[1].weights
    # The folder now has the second weights again: a study of the first ones must not use them.
    with pytest.raises(UserError, match="the worker has other weights of"):
        start_probes(cards[0], INPUTS, identity, PROBES, 1)


def test_each_member_of_a_batch_has_the_radius_of_its_own_sample(model):
    """Two samples of different size in one batch: R is the longest token of each."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(2, 5, 4, generator=g, dtype=torch.float64) * torch.tensor([[[1.0]], [[7.0]]])
    f = ls.SelfAttention(*torch.randn(3, 4, 4, generator=g, dtype=torch.float64))
    site = Site("attention", 3, ((0, None), (1, None)), f, X)
    found = Sigma(("attention",))(Place(site, n=5, samples=(6, 9), model=model, inputs=INPUTS))
    rows = [one for one in found if isinstance(one, Row)]
    norms = [one for one in found if not isinstance(one, Row)]
    longest = [max(math.hypot(*token) for token in sample.tolist()) for sample in X]
    assert [row.radius for row in rows] == pytest.approx(longest, rel=1e-12)
    assert [(row.sample, row.layer, row.n) for row in rows] == [(6, 3, 5), (9, 3, 5)]
    dense = [torch.linalg.matrix_norm(dense_jacobian(f, x), 2).item() for x in X]
    assert [row.value for row in rows] == pytest.approx(dense, rel=1e-6)
    assert [entry.sample for entry in norms] == [6, 9]
