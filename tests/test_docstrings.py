"""Docstrings of public names: each has one, in Google form, and its example runs."""

import doctest
import importlib
import inspect

import pytest

import lipscope

NAMESPACES = ("attack", "dynamics", "mean_field", "nn", "theorems")
PAGES = ["lipscope", *(f"lipscope.{name}" for name in NAMESPACES)]
PUBLIC = sorted(
    {
        (getattr(importlib.import_module(page), name).__module__, name)
        for page in PAGES
        for name in importlib.import_module(page).__all__
        if inspect.isclass(getattr(importlib.import_module(page), name))
        or inspect.isfunction(getattr(importlib.import_module(page), name))
    }
)
# A search of seconds, a heavy import, and two records that InvertibleResidual shows.
WITHOUT_EXAMPLE = {"largest_gain", "lightning_callback", "Inverse", "LogDet"}


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_a_public_name_is_documented(module, name):
    text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    summary = text.splitlines()[0] if text else ""
    assert summary and len(summary) <= 100, f"{module}.{name} has no one-line summary"
    assert ">>>" in text or name in WITHOUT_EXAMPLE, f"{module}.{name} has no example"


@pytest.mark.parametrize("module", sorted({module for module, _ in PUBLIC}))
def test_examples_run(module):
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.failed == 0


def test_the_contents_pages_were_read():
    assert {"SelfAttention", "L2SelfAttention", "DiscreteMeasure"} <= {name for _, name in PUBLIC}
    assert lipscope.__doc__
