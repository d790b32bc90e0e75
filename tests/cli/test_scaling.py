"""`measure --shard`, `--workers` and `--cluster` on the command line, and how they end."""

import pytest

from lipscope.cli import main
from lipscope.study import run
from lipscope.study.engines import SchedulerLostError


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--shard", "0/4"], "the shard must be a whole number from 1 to 4, got 0"),
        (["--shard", "four"], "--shard takes K/N, as in 3/64"),
        (["--workers", "2", "--cluster", "tcp://127.0.0.1:1"], "not both"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(options, told, capsys):
    # The model does not exist, and nobody finds out.
    assert main(["measure", "no/such/model", *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_lost_scheduler_is_one_line_and_exit_code_3(monkeypatch, tmp_path, capsys):
    def lose(*arguments, **options):
        raise SchedulerLostError("the scheduler ended; run the same command again to resume")

    monkeypatch.setattr(run, "measure", lose)
    monkeypatch.setattr("lipscope.models.loading.load", lambda *_, **__: None)
    assert main(["measure", "any", "--cluster", "tcp://127.0.0.1:1"]) == 3
    assert capsys.readouterr().err == (
        "lipscope: the scheduler ended; run the same command again to resume\n"
    )
