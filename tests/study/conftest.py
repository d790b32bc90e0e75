"""What tests of studies measure."""

import pytest

from lipscope.models.loading import load
from lipscope.models.model import Model
from tests.study.tiny import PROSE, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", layers=2)


@pytest.fixture(scope="module")
def model(tiny) -> Model:
    return load(tiny)


@pytest.fixture(scope="session")
def prose() -> str:
    return PROSE
