"""Whatever is written is read back, and whatever is changed behind the store's back is noticed."""

import json
import math
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipscope.study.jobs import Command, Request
from lipscope.study.records import COLUMNS, Row
from lipscope.study.salvage import MOST_PLACES, MOST_TOKENS, record_checksum
from lipscope.study.store import Store
from tests.study.fakes import info, row

# Every character, lone surrogates and NUL included.
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
FLOAT = st.floats()  # NaN, infinities, -0.0 and subnormal numbers included
NUMBER = st.integers(0, 2**40)
LAYER = st.integers(0, MOST_PLACES)
PLACE = st.none() | LAYER
LENGTH = st.integers(1, MOST_TOKENS)
EXTRA = st.dictionaries(st.text(), st.none() | st.integers() | st.text())
NORM = st.floats(0, 1, width=32)


@st.composite
def rows(draw) -> Row:
    """Any row that is allowed to exist."""
    lower, value, upper = sorted(draw(st.floats(allow_nan=False)) for _ in range(3))
    missing = draw(st.booleans())
    return Row(
        probe=draw(TEXT),
        scope=draw(TEXT),
        layer=draw(PLACE),
        head=draw(PLACE),
        n=draw(LENGTH),
        sample=draw(NUMBER),
        kind=draw(TEXT),
        norm=draw(TEXT),
        value=math.nan if missing else value,
        lower=lower,
        upper=upper,
        residual=draw(FLOAT),
        status="failed" if missing else draw(TEXT),
        radius=abs(draw(FLOAT)),
        dtype=draw(TEXT),
        device=draw(TEXT),
        seconds=abs(draw(FLOAT)),
        reason=draw(TEXT),
        extra=draw(EXTRA),
    )


def plain(one: Row) -> str:
    """What may be expected back: zeros without a sign, and text that UTF-8 can hold."""
    return repr(
        tuple(
            x.encode("utf-8", "backslashreplace").decode()
            if isinstance(x, str)
            else x + 0.0
            if isinstance(x, float)
            else x
            for x in one
        )
    )


def key(one: Row) -> str:
    return plain(one._replace(**dict.fromkeys(COLUMNS[8:], 0.0)))


@pytest.mark.wide
@settings(max_examples=200, deadline=None)
@given(st.lists(rows(), max_size=6, unique_by=key))
def test_any_rows_come_back(given_rows):
    store = Store.create(None, info())
    store.write(given_rows)
    found = sorted(repr(tuple(r)) for r in store.rows())
    assert found == sorted(map(plain, given_rows)) and store.check() == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(LENGTH, st.lists(NUMBER, min_size=1, unique=True).map(tuple))).map(tuple),
    st.dictionaries(LAYER, st.lists(LAYER, unique=True).map(tuple)),
    st.lists(TEXT, unique=True).map(tuple),
    TEXT,
)
def test_any_command_comes_back(groups, heads, scopes, line):
    command = Command("measure", line, Request(groups, tuple(heads), heads, scopes), "probe")
    store = Store.create(None, info())
    store.add_commands([command])
    store.add_commands([command])
    assert store.commands() == [command]


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
        max_leaves=12,
    )
)
def test_facts_of_any_shape_are_read(facts):
    """What a stranger or a broken lipscope wrote about a study: no crash, and the rows stay."""
    store = Store.create(None, info())
    store.write([row()])
    for name in ("identity", "about", "commands"):
        record = ("info", name, json.dumps(facts))
        store._db.execute(
            "UPDATE records SET value = ?, crc = ? WHERE key = ?",
            (record[2], record_checksum(record), name),
        )
    found = store.info()
    assert isinstance(found.about.model, str) and isinstance(found.about.scopes, dict)
    assert store.rows() == [row()] and isinstance(store.commands(), list)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*COLUMNS, "crc"]),
    st.none() | st.integers(-(2**60), 2**60) | FLOAT | TEXT | st.binary(max_size=9),
)
def test_a_change_behind_the_back_costs_that_row_alone(column, value):
    store = Store.create(None, info())
    store.write([row(layer=0), row(layer=1), row(layer=2)])
    before = {r.layer: repr(r) for r in store.rows()}
    try:
        store._db.execute(f"UPDATE rows SET {column} = ? WHERE layer = 1", (value,))
    except (sqlite3.Error, UnicodeError, OverflowError):
        return  # the schema refuses it
    found = {repr(r) for r in store.rows()}
    kept = {before[0], before[2]}
    # SQLite may convert the value to the very one that was there.
    assert (found == kept and len(store.lost) == 1) or (
        found == {*kept, before[1]} and not store.lost
    )
