"""Parts of a study, merged in any order and as often as you like, are the study."""

import random
from pathlib import Path

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study.directory import FILE
from lipscope.study.jobs import Command, Request, Shard
from lipscope.study.salvage import INFO
from lipscope.study.store import Store
from lipscope.study.study import Study, join
from lipscope.study.study import merge_directories as merge
from tests.study.fakes import ABOUT, answer, info, row
from tests.study.printed import exported

REQUEST = Request(
    groups=tuple((n, (0, 1)) for n in range(4, 29)),
    layers=(0, 1, 2, 3),
    heads=dict.fromkeys(range(4), ()),
    scopes=("attention",),
)
COMMAND = Command("measure", "lipscope measure fake/model", REQUEST)


def write_part(folder: Path, shard: Shard, **changes) -> Path:
    store = Store.create(folder, info(**changes), COMMAND)
    for job in REQUEST.jobs(()):
        if shard.has(job.place):
            outcome = answer(job)
            # Every run takes its own time.
            rows = [r._replace(seconds=random.random()) for r in outcome.rows]
            store.write(rows, outcome.sensitivities)
    store.close()
    return folder


def tokens(study: Study) -> list[tuple]:
    return list(study.token_records())


@pytest.mark.wide
def test_64_shards_in_random_order_some_twice_are_the_study(tmp_path):
    whole = Study.open(write_part(tmp_path / "whole", Shard(1, 1)))
    parts = [write_part(tmp_path / f"s{k}", Shard(k, 64)) for k in range(1, 65)]
    assert sum(len(Study.open(part).rows) for part in parts) == len(whole.rows) == 200
    assert any(not Study.open(part).rows for part in parts)  # some shards have nothing to do
    draw = random.Random(0)
    files = []
    for i in range(3):
        given = draw.sample(parts, 64) + draw.sample(parts, 9)
        out = tmp_path / f"out{i}"
        merge(out, given[:40])
        merge(out, given[30:])  # what is there already counts as a part
        merged = Study.open(out)
        assert exported(merged) == exported(whole)
        assert tokens(merged) == tokens(whole)
        assert (merged.commands, merged.jobs) == (whole.commands, whole.jobs)
        assert not merged.unfinished and Study.open(parts[0]).unfinished
        files.append((out / FILE).read_bytes())
    assert merge(tmp_path / "again", draw.sample(parts, 64)).content == "200 rows"
    # All orders give the same rows, their seconds included.
    assert len({str(Study.open(tmp_path / f"out{i}").rows) for i in range(3)}) == 1


def test_a_merge_can_be_resumed_and_grown(tmp_path):
    merge(tmp_path / "out", [write_part(tmp_path / "a", Shard(1, 2))])
    store = Store.create(tmp_path / "out", info(), COMMAND)
    left = REQUEST.jobs(store.done("sigma"))
    assert 0 < len(left) < 100 and not any(Shard(1, 2).has(job.place) for job in left)
    for job in left:
        store.write(answer(job).rows)
    store.close()
    assert not Study.open(tmp_path / "out").unfinished


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": "y" * 64}, "is a study of another text, compared with"),
        ({"weights": "v" * 64}, "is a study of another model, or other weights, compared"),
        ({"tol": 1e-3}, r"is a study of tol = 0.001 in place of 1e-06, compared"),
        ({"seed": 3}, "is a study of seed = 3 in place of 0"),
        ({"numeric_version": 9}, "another numeric version of lipscope"),
    ],
)
def test_other_models_texts_and_settings_are_refused_by_name(tmp_path, change, told):
    a, b = (write_part(tmp_path / name, Shard(1, 9), **c) for name, c in (("a", {}), ("b", change)))
    with pytest.raises(UserError, match=told):
        merge(tmp_path / "out", [a, b])
    assert not (tmp_path / "out").exists()
    merge(tmp_path / "out", [a])
    before = (tmp_path / "out" / FILE).read_bytes()
    with pytest.raises(UserError, match="out is a study of"):
        merge(tmp_path / "out", [b])
    assert (tmp_path / "out" / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "disputed"),
    [({"upper": 2.5}, 1), ({"lower": 1.5}, 1), ({"value": 2.01}, 1), ({"seconds": 9.0}, 0)],
)
def test_parts_that_differ_in_one_number_of_a_certificate_are_disputed(change, disputed):
    stores = [Store.create(None, info()) for _ in range(2)]
    stores[0].write([row(value=2.0), row(layer=1)])
    stores[1].write([row(value=2.0)._replace(**change), row(layer=1)])
    assert join(stores)[1] == join(stores[::-1])[1] == disputed


def test_a_value_counts_before_a_failure_and_a_dispute_is_counted(tmp_path):
    good, bad = row(value=2.0), row(value=2.0, status="failed")._replace(value=float("nan"))
    other = row(value=2.5)
    stores = []
    for rows in ([bad], [good], [other], [good]):
        store = Store.create(None, info())
        store.write(rows)
        stores.append(store)
    assert join(stores[:2])[0].rows() == [good] == join(stores[1::-1])[0].rows()
    assert join(stores[:2])[1] == 0 and join([stores[1], stores[3]])[1] == 0
    found = [join(order) for order in (stores, stores[::-1])]
    assert found[0][0].rows() == found[1][0].rows() and found[0][1] == 1


def test_records_of_any_kind_are_kept(tmp_path):
    for name, kind in (("a", "one kind"), ("b", "another")):
        part = write_part(tmp_path / name, Shard(1, 9))
        store = Store.create(part, info(), COMMAND)
        store.put(kind, "key", f"of {name}")
        store.close()
    merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    store = Store.open(tmp_path / "out")
    assert store.get("one kind", "key") == "of a" and store.get("another", "key") == "of b"
    assert store.info().about.model == ABOUT.model and store.get(INFO, "identity")


def test_a_damaged_part_gives_what_is_intact(tmp_path, capsys):
    a, b = (write_part(tmp_path / f"{k}", Shard(k, 2)) for k in (1, 2))
    cut_a_row(a)
    whole = len(Study.open(write_part(tmp_path / "whole", Shard(1, 1))).rows)
    assert main(["merge", str(tmp_path / "out"), str(a), str(b)]) == 3
    said = capsys.readouterr().err
    assert f"lipscope: {whole - 1} rows are in" in said and "1 is damaged: lost sigma of" in said
    merged = Study.open(tmp_path / "out")
    assert len(merged.rows) == whole - 1 and not merged.damage and merged.unfinished
    # A damaged OUT is not written to.
    cut_a_row(tmp_path / "out")
    before = (tmp_path / "out" / FILE).read_bytes()
    assert main(["merge", str(tmp_path / "out"), str(b)]) == 2
    assert "out is damaged" in capsys.readouterr().err
    assert (tmp_path / "out" / FILE).read_bytes() == before


def cut_a_row(directory: Path) -> None:
    """Change one digit of one number in the file."""
    file = directory / FILE
    content = bytearray(file.read_bytes())
    place = content.find(b"converged")
    content[place : place + 9] = b"conVerged"
    file.write_bytes(content)


def test_merge_says_what_is_wrong(tmp_path, capsys):
    part = write_part(tmp_path / "a", Shard(1, 2))
    for words, told in (
        ([str(tmp_path / "out"), str(tmp_path / "nothing")], "nothing does not exist"),
        ([str(tmp_path), str(part)], "is neither a study nor empty"),
    ):
        assert main(["merge", *words]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    assert main(["merge", "--quiet", str(tmp_path / "out"), str(part), str(part)]) == 0
    assert capsys.readouterr() == ("", "")
