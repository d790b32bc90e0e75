"""The jobs of a study: each row once, in groups that do not depend on what was already there."""

import json
import math
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipscope._types import UserError
from lipscope.study.jobs import Command, Job, Request, Shard, check_shard, grouped, parse_shard

HEADS = {0: (0, 1, 2), 2: (0, 1)}
ASKED = Request(
    grouped(list(product((8, 128, 512), range(5)))), (0, 2), HEADS, ("heads", "attention", "model")
)


def owed(jobs: list[Job]) -> list:
    return [target for job in jobs for target in job.row_keys()]


def test_every_target_once():
    targets = owed(ASKED.jobs(()))
    assert len(targets) == len(set(targets)) == 3 * 5 * ((3 + 1) + (2 + 1) + 1)
    assert ("model", None, None, 8, 4) in targets and ("heads", 2, 1, 128, 0) in targets


def test_short_samples_come_first_and_are_grouped():
    jobs = ASKED.jobs(())
    assert [job.n for job in jobs] == sorted(job.n for job in jobs)
    assert {job.samples for job in jobs if job.n == 8} == {(0, 1, 2, 3, 4)}
    assert {job.samples for job in jobs if job.n == 128} == {(0, 1, 2, 3), (4,)}
    assert {job.samples for job in jobs if job.n == 512} == {(i,) for i in range(5)}


def test_what_is_left_is_grouped_as_if_nothing_had_happened():
    jobs = ASKED.jobs(())
    for cut in range(0, len(jobs), 5):
        assert ASKED.jobs(set(owed(jobs[:cut]))) == jobs[cut:]
    assert ASKED.jobs(set(owed(jobs))) == []


def test_only_what_is_missing_is_asked():
    less = Request(((8, (0, 1)),), (0,), {0: (1,)}, ("heads",))
    more = Request(((8, (0, 1, 2)),), (0,), {0: (0, 1)}, ("heads", "attention"))
    jobs = more.jobs(set(owed(less.jobs(()))))
    assert jobs == [
        Job(8, (2,), 0, ("heads", "attention"), (0, 1)),
        Job(8, (0, 1), 0, ("heads", "attention"), (0,)),
    ] or jobs == [
        Job(8, (0, 1), 0, ("heads", "attention"), (0,)),
        Job(8, (2,), 0, ("heads", "attention"), (0, 1)),
    ]


def test_a_job_owes_a_row_per_scope_head_and_sample():
    job = Job(16, (0, 2), 1, ("heads", "attention"), (0, 3))
    assert list(job.row_keys()) == [
        ("heads", 1, 0, 16, 0), ("heads", 1, 0, 16, 2),
        ("heads", 1, 3, 16, 0), ("heads", 1, 3, 16, 2),
        ("attention", 1, None, 16, 0), ("attention", 1, None, 16, 2),
    ]  # fmt: skip
    failed = job.failed_rows("out of\n memory", "float32", "cuda")
    assert [r[1:6] for r in failed] == list(job.row_keys())
    assert {r.explained for r in failed} == {"failed: out of memory"}
    assert all(
        r.failing and math.isnan(r.value) and (r.lower, r.upper) == (0.0, math.inf) for r in failed
    )


def test_a_command_is_stored_under_the_keys_of_older_files():
    asked = Request(groups=((8, (0, 1)),), layers=(0,), heads={0: (1,)}, scopes=("heads",))
    command = Command("bounds", "lipscope bounds", asked, probe_prefix="worst found")
    stored = json.loads(json.dumps(command.as_json()))
    assert stored.keys() == {"verb", "line", "asked", "probe"}
    assert stored["probe"] == "worst found"
    assert Command.from_json(stored) == command


REQUEST = Request(
    groups=grouped([(n, sample) for n in (4, 100, 600) for sample in range(7)]),
    layers=(0, 1, 2),
    heads=dict.fromkeys(range(3), (0, 1)),
    scopes=("heads", "attention", "model"),
)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40))
def test_every_job_is_in_exactly_one_shard(count):
    shards = [Shard(number, count) for number in range(1, count + 1)]
    for job in REQUEST.jobs(()):
        assert sum(shard.has(job.place) for shard in shards) == 1


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 20), st.sets(st.integers(0, 10**6)))
def test_what_is_stored_moves_no_job_to_another_shard(count, picks):
    keys = [key for job in REQUEST.jobs(()) for key in job.row_keys()]
    done = {keys[pick % len(keys)] for pick in picks}
    for number in range(1, count + 1):
        shard = Shard(number, count)
        whole = {key for job in REQUEST.jobs(()) if shard.has(job.place) for key in job.row_keys()}
        rest = {key for job in REQUEST.jobs(done) if shard.has(job.place) for key in job.row_keys()}
        assert rest == whole - done


def test_shards_are_about_equal_and_the_same_in_every_process():
    jobs = [Job(n, (0,), layer, ("attention",), ()) for n in range(4, 204) for layer in range(12)]
    sizes = Counter(next(k for k in range(1, 9) if Shard(k, 8).has(job.place)) for job in jobs)
    # 2,400 jobs in 8 shards: 300 each, with a standard deviation of 16.
    assert sum(sizes.values()) == 2400 and all(220 < size < 380 for size in sizes.values())
    code = (
        "from lipscope.study.jobs import Job; from lipscope.study.jobs import Shard;"
        "job = Job(8, (0,), 3, ('model',), ());"
        "print([k for k in range(1, 100) if Shard(k, 99).has(job.place)])"
    )
    job = Job(8, (0,), 3, ("heads",), (1,))
    here = [k for k in range(1, 100) if Shard(k, 99).has(job.place)]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(here)


@pytest.mark.parametrize("text", ["3/64", "1/1", "64/64"])
def test_what_a_shard_is(text):
    assert parse_shard(text) == Shard(*map(int, text.split("/")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0/4", "the shard must be a whole number from 1 to 4, got 0"),
        ("5/4", "the shard must be a whole number from 1 to 4, got 5"),
        ("1/0", "the number of shards must be a whole number from 1"),
        ("3", "--shard takes K/N, as in 3/64; got '3'"),
        ("a/b", "--shard takes K/N"),
        ("-1/4", "--shard takes K/N"),
        ("1/" + "9" * 30, "--shard takes K/N"),
    ],
)
def test_what_is_refused(text, told):
    with pytest.raises(UserError, match=told):
        parse_shard(text)


def test_a_shard_in_python_is_a_pair():
    assert check_shard([2, 3]) == Shard(2, 3)
    with pytest.raises(UserError, match=r"a shard is a pair \(k, N\)"):
        check_shard((1, 2, 3))
