"""A few cases of the campaigns around studies from strangers, crashes and concurrent processes."""

import random
import shutil
from collections import Counter
from itertools import groupby

import pytest

from lipscope.study.directory import FILE, JOURNAL
from tests.campaigns import concurrency, edited_studies, hostile_studies, power_loss
from tests.campaigns.runner import Result

TRAPS = list(hostile_studies.TRAPS)


@pytest.mark.parametrize(
    ("trap", "commands"),
    [
        ("journal: super-journal", ("show", "merge into")),
        ("journal: header, file empty", ("show", "merge from")),
        ("journal: write-ahead log and index", ("show", "resume")),
        ("link to thesis.tex at report.html", ("report", "resume")),
        ("link to missing at study.sqlite", ("merge into", "resume")),
        ("link to folder at ../foreign.repaired", ("doctor --repair",)),
        ("fifo at study.sqlite-journal", ("show", "resume")),
        ("hard link at study.lock", ("merge into",)),
    ],
)
def test_hostile_folders(trap, commands):
    result = Result()
    hostile_studies.examine(TRAPS.index(trap), result, commands)
    assert not result.faults and sum(result.total().values()) == len(commands)


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (142, "report"),  # a command line with one quotation mark
        (195, "report"),  # a negative square in a budget
        (464, "report, as reference"),  # values that are infinite
        (575, "report"),  # a budget with fewer products than probes
        (811, "report"),  # a radius too small for an axis
        (507, "merge"),  # 900 commands
    ],
)
def test_studies_that_once_harmed_a_command(number: int, command: str):
    result = Result()
    edited_studies.examine(number, result, {command: edited_studies.COMMANDS[command]})
    assert result.faults == []


def test_edited_studies():
    result = Result()
    for number in (12, 15):
        edited_studies.examine(number, result)
    assert not result.faults
    assert sum(result.total().values()) == 2 * len(edited_studies.COMMANDS)


def test_concurrent_reads(tmp_path):
    result = Result()
    concurrency.read_letters(tmp_path, 200, result)
    concurrency.read_study(tmp_path, 15, result)
    assert not result.faults and result.counts["reads beside a writer"] == {"whole": 15}
    assert concurrency.mixed(b"A" * 200_000 + b"B") and not concurrency.mixed(b"B" * 130_000)


needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace, which records system calls, is not installed"
)


@needs_strace
def test_power_losses():
    record = power_loss.recorded()
    wrong = Counter(
        power_loss.replay(i, random.Random(i), record) for i in range(1, len(record), 7)
    )
    assert set(wrong) == {""}


@needs_strace
def test_the_replay_sees_a_commit_that_is_not_on_disk():
    record = power_loss.recorded("FULL")
    notes = [i for i, step in enumerate(record) if step.what == "note"]
    assert any(
        "acknowledged" in power_loss.replay(i + 1, random.Random(seed), record)
        for i in notes
        for seed in range(4)
    )


@needs_strace
def test_every_commit_syncs_journal_file_and_folder():
    record = power_loss.recorded()
    parts = groupby(record, lambda step: step.what == "note")
    of_jobs = [list(steps) for is_note, steps in parts if not is_note]
    for steps in of_jobs[1 : power_loss.JOBS]:  # the first creates the study, the last merges it
        synced = Counter(step.path for step in steps if step.what == "sync")
        # The journal before and after its header, the folder when it comes and when it goes.
        study = "new/study"
        assert synced == {f"{study}/{JOURNAL}": 2, f"{study}/{FILE}": 1, study: 2}
        assert [step.what for step in steps][-2:] == ["unlink", "sync"]
