"""The tiny model and the prose of the study tests, for audits."""

from tests.study.conftest import model, prose, tiny

__all__ = ["model", "prose", "tiny"]
