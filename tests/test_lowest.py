"""Lower bounds are found where they are missing, and pins with hashes are those of constraints."""

from __future__ import annotations

import re

import pytest

from tests.hashes import HASHED, pins
from tests.lowest import declared, lowest, same

PROJECT = {
    "dependencies": ["torch>=2.6", "a-b.c>=1.2.0,<2"],
    "optional-dependencies": {"data": ["d>=3"], "cluster": ["e>=2024.8.1"], "dev": ["f"]},
}


def test_every_dependency_has_a_lower_bound():
    assert len(declared()) >= 17


def test_lower_bounds_are_read():
    assert lowest(PROJECT) == {"torch": "2.6", "a-b.c": "1.2.0", "d": "3", "e": "2024.8.1"}


def test_a_dependency_without_one_is_found():
    broken = {**PROJECT, "dependencies": ["torch>=2.6", "nothing"]}
    with pytest.raises(ValueError, match="nothing has no lower bound"):
        lowest(broken)


def test_versions_are_compared_as_versions():
    assert same("5.0.0", "5") and same("2.6.0+cpu", "2.6") and not same("2.6.1", "2.6")


def test_every_pin_has_hashes_and_no_other_version():
    text = HASHED.read_text()
    hashed = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE))
    assert hashed == pins()
    for block in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", block.strip()), block[:60]
    assert "://" not in text
