"""Claims on workers: the verdicts of one process, shared measurements, deaths, other machines."""

import os
import signal
from functools import partial

import pytest

from lipscope import UserError, __version__
from lipscope.cli import main
from lipscope.papers.claim_runs import ClaimJob, ClaimWork, group_of, start_claims
from lipscope.papers.claims import NotAvailable
from lipscope.papers.registry import claims
from lipscope.papers.running import reproduce_papers
from lipscope.papers.setting import Setting
from lipscope.study.study import merge_directories as merge
from tests.papers.planted import claim

pytestmark = pytest.mark.timeout(600)


def measured_once(folder, setting):
    """A measurement that several claims share, which leaves a file each time it is made."""

    def make():
        made = len(list(folder.iterdir()))
        (folder / f"{os.getpid()}-{made}").touch()
        return {"x": 2, "pid": os.getpid()}

    return setting.shared("once", make)


def die(setting):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(setting):
    raise ZeroDivisionError("by zero")


def lack(setting):
    raise NotAvailable("a GPU")


def test_groups_are_the_claims_that_share_a_measurement():
    groups = {}
    for one in claims():
        groups.setdefault(group_of(one), []).append(one.id)
    together = [ids for ids in groups.values() if len(ids) > 1]
    assert ["C1", "C2", "C3", "C4"] in together and ["C25", "C26", "C27", "C28", "C29"] in together
    assert ["K4", "K5"] in together and ["K7", "K8"] in together
    assert ["C30"] in groups.values()


@pytest.mark.wide
def test_two_workers_give_what_one_process_gives(tmp_path):
    only = ["C34", "S1", "S3", "S9", "S10", "V4"]
    alone = reproduce_papers(only=only, quick=True)
    shared = reproduce_papers(only=only, quick=True, workers=2, out=tmp_path)
    for one, other in zip(alone, shared, strict=True):
        assert (one.claim.id, one.word) == (other.claim.id, other.word)
        assert one.record.used == other.record.used and other.record.code
        expected = pytest.approx(other.verdict.interval or (), rel=1e-6)
        assert (one.verdict.interval or ()) == expected
    again = reproduce_papers(only=only, quick=True, workers=2, out=tmp_path)  # judged alone
    assert [one.record for one in again] == [one.record for one in shared]


def test_a_claim_that_kills_its_worker_fails_alone_and_the_rest_is_kept(
    registered, tmp_path, capsys
):
    (tmp_path / "made").mkdir()
    run = partial(measured_once, tmp_path / "made")
    registered += [
        claim(die, id="C1"),
        *(claim(run, id=f"C{i}") for i in (2, 3, 4)),
        claim(fail, id="C5"),
        claim(lack, id="C6"),
    ]
    command = ["reproduce", "--workers", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 3
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[:2] for line in lines[:6]]
    assert words == [
        ["C1", "FAILED"],
        ["C2", "REPRODUCED"],
        ["C3", "REPRODUCED"],
        ["C4", "REPRODUCED"],
        ["C5", "FAILED"],
        ["C6", "NEEDS"],
    ]
    assert "the worker died while running this job, 3 times" in lines[0]
    assert "ZeroDivisionError: by zero" in lines[4]
    # Three claims share one measurement: made once, or once more where a worker had died.
    assert len(list((tmp_path / "made").iterdir())) <= 2
    del registered[0]
    registered[3] = claim(lambda setting: {"x": 2}, id="C5")
    outcomes = reproduce_papers(out=tmp_path / "out")
    assert [one.word for one in outcomes] == ["REPRODUCED"] * 4 + ["NEEDS"]
    assert len({one.record.numbers["pid"] for one in outcomes[:3]} - {os.getpid()}) >= 1


def test_a_worker_with_another_version_or_without_the_folders_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"the worker has lipscope .*, not 0\.0"):
        start_claims("0.0", claims, Setting().options, 1)
    options = Setting(models=tmp_path).options
    tmp_path.rmdir()
    with pytest.raises(UserError, match="models must be a folder"):
        start_claims(__version__, claims, options, 1)


def test_what_is_missing_is_named_and_not_kept():
    work = ClaimWork({"C1": claim(lack)}, Setting())
    found = work(ClaimJob("C1", ""))
    assert found.failure == "needs: a GPU" and not found.records


def test_shards_share_the_claims_and_are_merged(registered, tmp_path):
    registered += [claim(lambda setting: {"x": 2}, id=f"C{i}") for i in range(1, 7)]
    parts = [tmp_path / str(k) for k in (1, 2, 3)]
    ran = [
        one.claim.id
        for k, part in enumerate(parts, 1)
        for one in reproduce_papers(out=part, shard=(k, 3))
    ]
    assert sorted(ran) == [f"C{i}" for i in range(1, 7)]
    merge(tmp_path / "all", parts)
    seen = []
    outcomes = reproduce_papers(out=tmp_path / "all", progress=lambda *at: seen.append(at))
    assert [one.word for one in outcomes] == ["REPRODUCED"] * 6 and seen == [(0.0, 0)]


def test_workers_are_checked_before_anything_is_run(capsys):
    assert main(["reproduce", "--workers", "0"]) == 2
    assert "workers must be at least 1" in capsys.readouterr().err
