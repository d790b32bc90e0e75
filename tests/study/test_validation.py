"""What a study stores makes sense, whatever its checksums say."""

import json
import math
from array import array
from dataclasses import asdict

import pytest

from lipscope.cli import main
from lipscope.study.directory import FILE
from lipscope.study.jobs import Command, Request, command_lines, count_jobs
from lipscope.study.records import COLUMNS, Fingerprint
from lipscope.study.salvage import (
    CLAIM,
    INFO,
    MOST_COMMANDS,
    NORMS,
    TOKENS,
    _commands,
    record_checksum,
    row_checksum,
    valid_record,
    valid_row,
)
from lipscope.study.store import Store, _stored
from tests.study.damage import make
from tests.study.fakes import IDENTITY, info, row

ASKED = {
    "groups": [[8, [0, 1]], [16, [0]]],
    "layers": [0, 1],
    "heads": [[0, [0, 1]], [1, [0]]],
    "scopes": ["heads"],
}


def command(**changes):
    return {"verb": "measure", "line": "x", "asked": {**ASKED, **changes}, "probe": "sigma"}


def valid_commands(*listed):
    return valid_record((INFO, "commands", json.dumps(listed)))


def test_columns_are_frozen():
    assert ",".join(COLUMNS) == (
        "probe,scope,layer,head,n,sample,kind,norm,value,lower,upper,residual,status,radius,dtype,device,seconds,reason,extra"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"lower": 3.0}, {"upper": 1.0}, {"lower": math.nan}, {"upper": math.nan},
        {"value": math.nan}, {"value": math.nan, "status": "max_steps"},
    ],
)  # fmt: skip
def test_an_impossible_row_is_not_written(changes):
    with pytest.raises(ValueError, match="a study cannot hold this row: lower <= value <= upper"):
        Store.create(None, info()).write([row(**changes)])


def test_identity_names_its_differences():
    assert IDENTITY.differences(IDENTITY) == []
    changed = Fingerprint(**{**vars(IDENTITY), "tol": 1e-3, "text": "y"})
    assert IDENTITY.differences(changed) == ["text", "tol"]


def test_rows_that_make_sense():
    assert valid_row(_stored(row()))
    assert valid_row(_stored(row(layer=None, upper=math.inf, residual=math.nan, radius=math.nan)))
    assert valid_row(_stored(row(value=0.0, lower=0.0, upper=0.0)))  # a map that is constant
    failed = row(value=math.nan, lower=0.0, upper=math.inf, status="failed", reason="x")
    assert valid_row(_stored(failed))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (0, "x" * 2000), (0, None), (1, b"heads"), (2, -2), (2, 2**40), (2, 0.0), (3, True),
        (4, 0), (4, 2**62), (4, "8"), (5, -1), (8, None), (8, 5.0), (8, "2"), (9, 3.0),
        (9, math.nan), (10, None), (10, 1.0), (12, "x" * 200_000), (13, -1.0), (16, "soon"),
        (17, None), (17, "x" * 200_000), (18, ""), (18, "[]"), (18, "[" * 10_000), (18, None),
    ],
)  # fmt: skip
def test_rows_that_do_not(column, value):
    record = list(_stored(row()))
    record[column] = value
    assert not valid_row(tuple(record))


def test_commands_that_make_sense():
    assert valid_commands() and valid_commands(command()) and valid_commands(command(groups=[]))
    assert not valid_commands(*[command()] * (MOST_COMMANDS + 1))


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [[0, [0]]]}, {"groups": [[8, []]]}, {"groups": [[8, [0, 0]]]},
        {"groups": [["8", [0]]]}, {"groups": [[8, ["a"]]]}, {"groups": [[8, None]]},
        {"groups": [[8, {}]]}, {"groups": [[8, [[1]]]]}, {"groups": [[8.0, [0]]]},
        {"groups": 5}, {"layers": [0, 0]}, {"layers": [2]}, {"layers": [True]},
        {"layers": ["0"]}, {"heads": []}, {"heads": [[0, [0, 0]], [1, []]]}, {"heads": [[0, 1]]},
        {"scopes": [5]}, {"scopes": ["heads", "heads"]}, {"scopes": [[]]}, {"scopes": None},
        {"groups": [[8, [i]] for i in range(2000)], "layers": list(range(600)),
         "heads": [[i, []] for i in range(600)]},
    ],
)  # fmt: skip
def test_commands_that_do_not(change):
    assert not valid_commands(command(**change))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (INFO, "identity", {"tol": -1.0}), (INFO, "identity", {"seed": True}),
        (INFO, "identity", {"gap": math.nan}), (INFO, "identity", []),
        (INFO, "identity", {"text": "x" * 5000}), (INFO, "about", {"confidence": 10**400}),
        (INFO, "about", {"confidence": 2}), (INFO, "about", {"layers": -1}),
        (INFO, "about", {"layers": 10**9}), (INFO, "about", {"scopes": {"a": 5}}),
        (INFO, "about", {"scopes": []}), (INFO, "about", {"model": None}),
        (TOKENS, "[2, 0]", ["a"]), (TOKENS, "[1, 0]", [5]), (TOKENS, "[0, 0]", []),
        (TOKENS, "[1]", ["a"]), (TOKENS, "x", ["a"]), (TOKENS, "[true, 0]", ["a"]),
        ("budget", "[]", {}), ("budget", "5", {}), ("worst case", '["a", "b"]', "x"),
        ("worst case", '["a"]', 1.0), (CLAIM, "x", {}), (CLAIM, "x", []),
    ],
)  # fmt: skip
def test_records_that_do_not(kind, key, value):
    assert not valid_record((kind, key, json.dumps(value)))


CLAIMED = {
    "id": "a", "device": "cpu", "code": "x", "version": "1", "used": {"torch": "2"}, "numbers": {},
    "quick": True, "seed": 0, "seconds": 1.5,
}  # fmt: skip
PLACE = ["logits", 4, False, True, 0, 2, 8, "bf16"]
PART = {
    "n": 8, "summed": False, "sites": [["q", 0, "matmul", None], ["k", 1, "norm", 3]],
    "q": [[0.5, 1.0]] * 4, "size": 2.0, "observed": None, "curved": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True), ({"random_init": None}, True), ({"random_init": 2**64}, True),
        ({"random_init": 2**64 + 1}, False), ({"random_init": -(2**63) - 1}, False),
        ({"confidence": 1.0}, True), ({"confidence": 1.0001}, False), ({"confidence": -0.1}, False),
        ({"layers": 0}, True), ({"layers": -1}, False), ({"heads": -1}, False),
        ({"text_tokens": -1}, False), ({"difference_to_eager": math.nan}, False),
        ({"versions": {"torch": "x" * 10**6}}, False),
    ],
)  # fmt: skip
def test_descriptions_are_checked_field_by_field(change, valid):
    about = json.dumps({**asdict(info().about), **change})
    assert valid_record((INFO, "about", about)) == valid


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True), ({"seed": 2**64}, True), ({"seed": -(2**63)}, True),
        ({"seed": 2**64 + 1}, False),
        ({"seed": -(2**63) - 1}, False), ({"seed": 0.0}, False), ({"quick": 1}, False),
        ({"seconds": "1"}, False), ({"seconds": 3}, True), ({"id": 5}, False),
        ({"version": "x" * 5000}, False), ({"used": {"torch": 2}}, False), ({"used": []}, False),
        ({"numbers": []}, False), ({"more": 1}, False),
    ],
)  # fmt: skip
def test_claims_are_checked_field_by_field(change, valid):
    assert valid_record((CLAIM, "x", json.dumps({**CLAIMED, **change}))) == valid


@pytest.mark.parametrize(
    ("place", "part", "valid"),
    [
        ({}, {}, True), ({0: 5}, {}, False), ({7: None}, {}, False), ({1: -1}, {}, False),
        ({1: 4.0}, {}, False), ({2: 0}, {}, False), ({3: 1}, {}, False), ({4: 2**64}, {}, True),
        ({4: 2**64 + 1}, {}, False), ({4: -(2**63) - 1}, {}, False), ({5: -1}, {}, False),
        ({6: 0}, {"n": 0}, False), ({6: 9}, {}, False), ({6: 1}, {"n": 1}, True),
        ({}, {"summed": 0}, False), ({}, {"size": None}, False), ({}, {"observed": 1}, True),
        ({}, {"observed": "1"}, False), ({}, {"curved": [1.0, 2]}, True),
        ({}, {"curved": [1.0]}, False), ({}, {"curved": [1.0, None]}, False),
        ({}, {"q": [[0.5]] * 4}, False), ({}, {"q": [[0.5, None]]}, False), ({}, {"q": []}, False),
        ({}, {"q": [[0.5, 1.0]] * 3}, False), ({1: 0}, {"q": []}, True),
        ({}, {"size": -1.0}, False), ({}, {"size": 0}, True),
        ({}, {"observed": -1.0}, False), ({}, {"curved": [1, -1]}, False),
        ({}, {"sites": []}, False), ({}, {"sites": [], "q": []}, True),
        ({}, {"sites": [], "q": [[]]}, False),
        ({}, {"sites": [["q", 0, "matmul", -1], ["k", 1, "norm", 3]]}, False),
        ({}, {"sites": [["q", 10**9, "matmul", 0], ["k", 1, "norm", 3]]}, False),
        ({}, {"sites": [["q", None, 5, 0], ["k", 1, "norm", 3]]}, False),
    ],
)  # fmt: skip
def test_budgets_are_checked_field_by_field(place, part, valid):
    key = [place.get(i, x) for i, x in enumerate(PLACE)]
    assert valid_record(("budget", json.dumps(key), json.dumps({**PART, **part}))) == valid


@pytest.mark.parametrize(
    ("key", "norms", "valid"),
    [
        (["heads", 0, 1, 2, 0], [0.6, 0.8, 1.0, 0.0], True),
        (["model", None, None, 1, 0], [1.0, 1.0], True),
        (["heads", 0, 1, 2, 0], [0.6, 0.8, 1.0], False),
        (["heads", 0, 1, 2, 0], [0.6, math.nan, 1.0, 0.0], False),
        (["heads", 0, 1, 2, 0], [math.nan, 0.6, 1.0, 0.0], False),
        (["heads", 0, 1, 2, 0], [0.6, -0.8, 1.0, 0.0], False),
        (["heads", 0, 1, 2, 0], [0.6, 80.0, 1.0, 0.0], False),
        (["heads", 0, 1, 0, 0], [], False),
        (["heads", 0, 1, 2**62, 0], [0.6, 0.8], False),
        ([5, 0, 1, 1, 0], [1.0, 1.0], False),
        (["heads", "0", 1, 1, 0], [1.0, 1.0], False),
        (5, [1.0, 1.0], False),
    ],
)
def test_token_norms(key, norms, valid):
    assert valid_record((NORMS, json.dumps(key), array("f", norms).tobytes())) == valid


@pytest.mark.parametrize("value", ["", "nonsense", "[" * 100_000, "1" * 5000, b"\xff", "null"])
def test_what_is_no_json_is_no_record(value):
    for kind, key in ((INFO, "commands"), (INFO, "about"), (TOKENS, "[1, 0]"), (CLAIM, "x")):
        assert not valid_record((kind, key, value))


def test_records_of_other_kinds_are_left_to_other_versions():
    assert valid_record(("a newer kind", "key", "anything"))
    assert not valid_record(("a newer kind", "key", 5))
    assert not valid_record(("x" * 5000, "key", "anything"))


def test_absurd_content_with_right_checksums_is_lost_and_said_to_be(tmp_path, capsys):
    """Each of them ended in a traceback, or never."""
    make(tmp_path / "s")
    store = Store.create(tmp_path / "s", Store.open(tmp_path / "s").info())
    absurd = list(_stored(row("heads", 0, 0)))
    absurd[4] = 2**62
    store._db.execute("PRAGMA ignore_check_constraints = 1")
    store._db.execute(
        f"INSERT INTO rows VALUES ({', '.join('?' * 20)})", (*absurd, row_checksum(tuple(absurd)))
    )
    record = (INFO, "commands", json.dumps([command(groups=[[0, [0]]])]))
    store._db.execute(
        "UPDATE records SET value = ?, crc = ? WHERE key = 'commands'",
        (record[2], record_checksum(record)),
    )
    store.close()
    before = (tmp_path / "s" / FILE).read_bytes()
    for words in (["show"], ["show", "--json"], ["export"], ["doctor"]):
        assert main([words[0], str(tmp_path / "s"), *words[1:]]) == 3
        said = capsys.readouterr()
        assert f"n = {2**62}" in said.err + said.out
    assert (tmp_path / "s" / FILE).read_bytes() == before


def test_twelve_million_rows_that_were_asked_for_are_counted_at_once():
    heads = tuple(range(30))
    asked = Request(
        groups=tuple((8, tuple(range(64 * i, 64 * i + 64))) for i in range(60)),
        layers=tuple(range(100)),
        heads=dict.fromkeys(range(100), heads),
        scopes=("heads",),
    )
    one = Command(verb="measure", line="first", asked=asked)
    two = one._replace(line="second")
    assert count_jobs([one, two], [row("heads", 0, 0)]) == (0, 6000)
    assert command_lines([one, two]) == ["second"]


def test_the_commands_of_a_study_are_checked_once_for_all_reads(tmp_path):
    make(tmp_path / "study")
    _commands.cache_clear()
    assert main(["show", str(tmp_path / "study")]) == 0
    assert _commands.cache_info().misses == 1 and _commands.cache_info().hits >= 1
