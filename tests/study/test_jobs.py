"""The jobs of a study: each row once, in groups that do not depend on what was already there."""

import json
import math
from itertools import product

from lipscope.study.jobs import Command, Job, Request, grouped

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
