"""`lipscope bounds`: sound rows for every head, stored in the study, and a table of tightness."""

import shlex

import pytest
import torch
from rich.console import Console

from lipscope.attack.ascent import Climb
from lipscope.cli import main
from lipscope.models.loading import load
from lipscope.probes.bounds import BOUND, REGIME, WORST, audit_model
from lipscope.report.bounds import bound_summary
from lipscope.study.records import SIGMA
from lipscope.study.study import Study
from lipscope.study.study import merge_directories as merge

SHORT = Climb(steps=2, restarts=1)


@pytest.fixture(scope="module")
def audited(tiny, prose):
    return audit_model(load(tiny), prose, (8,), layers=[1], climb=SHORT)


def test_upper_bounds_lie_above_sigma_and_bounds_on_the_ball_above_the_worst_found(audited):
    rows = {(r.head, r.probe): r for r in audited.study.rows}
    heads = {r.head for r in audited.study.sigma}
    assert heads == {0, 1}
    for head in heads:
        sigma, worst = rows[head, SIGMA], rows[head, WORST]
        assert worst.value >= sigma.value * (1 - 1e-6) and worst.radius >= sigma.radius
        assert rows[head, BOUND + "input-dependent"].value >= sigma.value
        assert rows[head, BOUND + "compact"].value >= worst.value
        assert rows[head, BOUND + "tuned gap"].value <= rows[head, BOUND + "compact"].value
        assert rows[head, REGIME].value >= 0


def test_heads_are_audited_on_the_tokens_of_the_text_alone(audited):
    """The tokenizer would add [CLS] and [SEP], which the search and the bounds do not see."""
    assert not audited.study.info.identity.special_tokens
    assert "[CLS]" not in [t.token for t in audited.study.tokens(1)]


def test_what_is_not_offered_says_why(audited):
    assert "distances" in audited.not_offered["L2 attention"]


def test_a_larger_ball_has_larger_bounds(tiny, prose, audited):
    wide = audit_model(load(tiny), prose, (8,), layers=[1], heads=[0], radius=50, climb=SHORT)
    name = BOUND + "compact"
    (small,) = (r for r in audited.study.rows if r.probe == name and r.head == 0)
    (large,) = (r for r in wide.study.rows if r.probe == name)
    assert large.radius == 50 and large.value > small.value


def test_a_head_without_values_is_in_the_table(tiny, prose):
    model = load(tiny)
    with torch.no_grad():
        value = next(p for name, p in model.trunk.named_parameters() if "value.weight" in name)
        value[: len(value) // 2] = 0
        for name, p in model.trunk.named_parameters():
            if "value.bias" in name:
                p.zero_()
    found = audit_model(model, prose, (4,), layers=[0], climb=SHORT)
    assert min(r.value for r in found.study.rows if r.probe == WORST) == 0
    console = Console(width=200, record=True, quiet=True)
    console.print(bound_summary(found))


def test_the_command_prints_ratios_and_its_rows_join_the_study(tiny, prose, tmp_path, capsys):
    text, out = tmp_path / "prose.txt", tmp_path / "study"
    text.write_text(prose)
    shared = f"{tiny} --text {text} --lengths 8 --out {out}"
    words = f"bounds {shared} --layers 0".split()
    assert main(f"measure {shared} --samples 1".split()) == 0
    before = len(Study.open(out).rows)
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr().out
    for part in ("input-dependent", "tightness", "worst", "regime"):
        assert part in said
    study = Study.open(out)
    assert len(study.rows) > before and {r.probe for r in study.rows} >= {
        SIGMA,
        WORST,
        BOUND + "compact",
    }
    assert main(words) == 0
    assert [r for r in Study.open(out).rows if r.probe == WORST] == [
        r for r in study.rows if r.probe == WORST
    ]
    # The study names both commands, once, and repeating them gives the study again.
    again = Study.open(out)
    assert [line.split()[1] for line in again.commands] == ["measure", "bounds"]
    assert str(text) in again.commands[1] and again.jobs.done == again.jobs.asked > 2
    for line in again.commands:
        assert main([*shlex.split(line)[1:], "--out", str(tmp_path / "again")]) == 0
    repeated = Study.open(tmp_path / "again")
    # Where no command fails, no file is left beside the database.
    assert not list(tmp_path.glob("*/study.sqlite-*"))
    assert [r._replace(seconds=0) for r in repeated.rows] == [
        r._replace(seconds=0) for r in again.rows
    ]
    assert repeated.info == again.info


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--radius", "0"], "radius must be a positive number"),
        (["--radius", "-2"], "radius must be a positive number"),
        (["--radius", "0.001"], "outside the ball"),
        (["--layers", "9"], "layer 9 does not exist"),
        (["--lengths", "9999"], "9999"),
    ],
)
def test_bad_input_is_told_in_a_line(tiny, options, says, tmp_path, prose, capsys):
    text = tmp_path / "prose.txt"
    text.write_text(prose)
    given = [*options, *([] if "--lengths" in options else ["--lengths", "8"])]
    assert main(["bounds", tiny, "--text", str(text), *given]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.wide
def test_workers_and_shards_give_the_same_rows(tiny, prose, tmp_path):
    asked = {"lengths": (8,), "samples": 2, "climb": SHORT}

    def rows(study):
        return [row._replace(seconds=0) for row in study.rows]

    whole, refused = audit_model(load(tiny), prose, **asked)
    parallel = audit_model(load(tiny), prose, **asked, workers=2)
    assert rows(parallel.study) == rows(whole) and parallel.not_offered == refused
    parts = [tmp_path / str(k) for k in (1, 2, 3)]
    for k, part in enumerate(parts, 1):
        audit_model(load(tiny), prose, **asked, shard=(k, 3), out=part)
    merge(tmp_path / "all", parts)
    merged = Study.open(tmp_path / "all")
    assert rows(merged) == rows(whole) and not merged.unfinished
    seen = []
    again = audit_model(
        load(tiny), prose, **asked, out=tmp_path / "all", progress=lambda *at: seen.append(at)
    )
    assert seen == [(0.0, 0)] and again.not_offered == refused  # nothing was left to do
