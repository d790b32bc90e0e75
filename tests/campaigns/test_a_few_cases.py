"""A few cases of each campaign."""

import random
import shutil
from collections import Counter
from itertools import groupby

import pytest

from lipscope.study.directory import FILE, JOURNAL
from tests.campaigns import (
    bound_comparisons,
    concurrency,
    edited_studies,
    hostile_studies,
    memory,
    power_loss,
    random_problems,
)
from tests.campaigns.bound_comparisons import LAYERS, audit, audit_layer, audit_network
from tests.campaigns.runner import Result
from tests.test_certificates import Draw


@pytest.mark.parametrize("kind", dict.fromkeys(random_problems.OWN), ids=lambda kind: kind.__name__)
def test_random_problems(kind):
    result = Result()
    for seed in range(3):
        random_problems.judged("", kind(Draw(seed)), result, kind.__name__)
    assert result.total()["problems"] == 3
    assert not result.faults, result.faults


def test_coarse_products_do_not_end_a_solve_early():
    """Scores so large that a residual of 0.1 was accepted: the value was 1.5 % off, status ok."""
    result = Result()
    random_problems.judged("", random_problems.single_precision(Draw(32940)), result, "32940")
    assert not result.faults, result.faults


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(bound_comparisons, "BATCH", 6)
    monkeypatch.setattr(bound_comparisons, "STEPS", (0.1,))


@pytest.mark.parametrize("make", dict.fromkeys(LAYERS), ids=lambda make: make.__name__)
def test_bounds_hold(make, few):
    result = Result()
    for seed in (0, 2):
        audit(*make(Draw(seed)), Draw(6), result, "")
    assert result.total()["comparisons"] > 5 and not result.faults, result.faults


@pytest.mark.parametrize("check", [audit_layer, audit_network])
def test_bounds_of_layers_and_networks_hold(check, few):
    result = Result()
    check(Draw(3), result, "")
    assert result.total()["comparisons"] > 10 and not result.faults, result.faults


@pytest.mark.slow  # a process that ran other tests holds thousands of blocks more
@pytest.mark.parametrize("kind", memory.KINDS[:4])
def test_calls_keep_nothing(kind, tmp_path):
    blocks, _ = memory.growth(memory.call_of(kind, tmp_path), 20)
    assert blocks < 10 * memory.PER_CALL


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
    number = list(hostile_studies.TRAPS).index(trap)
    hostile_studies.examine(number, result, commands)
    assert not result.faults and sum(result.total().values()) == len(commands)


@pytest.mark.wide
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


@pytest.mark.wide
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
