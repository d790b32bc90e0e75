"""Shards: every job is in exactly one, whatever has been stored and wherever it is asked."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipscope._types import UserError
from lipscope.study.jobs import Job, Request, Shard, check_shard, grouped, parse_shard

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
