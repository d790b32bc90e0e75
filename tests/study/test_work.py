"""A worker compares the model it loads with the one that the study is of, before its first job."""

from dataclasses import replace

import pytest

from lipscope._types import UserError
from lipscope.study.reading import Windows
from lipscope.study.work import NUMERIC_VERSION, config_digest, start_sigma_work
from tests.study.fakes import IDENTITY

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
