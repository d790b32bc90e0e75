"""What tests of several files of this folder share."""

import pytest

from lipscope.papers import running
from lipscope.papers.claims import Claim, Quoted
from tests.study.conftest import model, prose, tiny

__all__ = ["model", "prose", "tiny"]


@pytest.fixture
def registered(monkeypatch):
    """Puts claims of a test in place of the registered ones."""
    found: list[Claim] = []
    monkeypatch.setattr(running, "claims", lambda: found)
    monkeypatch.setitem(running.QUOTED, "C1", Quoted("page 2"))
    return found
