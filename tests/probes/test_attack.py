"""`lipscope attack`: every kind on a tiny model, measured again, kept in the study."""

import math
import os
import shutil
import signal
import time

import pytest
import torch
from transformers import BertConfig, BertModel

from lipscope._types import UserError
from lipscope.attack.search import fresh_seed
from lipscope.attack.tokens import guided_swaps
from lipscope.cli import main
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.spectral import spectral_norm
from lipscope.models.loading import load
from lipscope.probes.attack import KINDS, PROBE, TOKEN_SEARCHES, AttackPlan, attack_model
from lipscope.probes.token_target import layer_sigma, output_change
from lipscope.study.study import Study
from lipscope.study.study import merge_directories as merge


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_finds_something_and_keeps_it(kind, tiny, prose, tmp_path, capsys):
    text, out = tmp_path / "prose.txt", tmp_path / "study"
    text.write_text(prose)
    options = f"--kind {kind} --text {text} --layers 1 --length 6 --swaps 1 --out {out}".split()
    assert main(["attack", tiny, *options]) == 0
    assert "found" in capsys.readouterr().out
    rows = [r for r in Study.open(out).rows if r.probe.startswith(f"{PROBE}{kind}")]
    assert rows and all(r.layer == 1 and r.value > 0 for r in rows)
    study = Study.open(out)
    (line,) = study.commands
    assert line.startswith(f"lipscope attack {tiny} --text {text} ") and not study.unfinished
    assert f" --kind {kind} --length 6 --swaps 1" in line and " --layers 1 " in line
    # Older versions of filelock remove the lock.
    assert {path.name for path in out.iterdir()} - {"study.lock"} == {"study.sqlite"}


@pytest.mark.wide
def test_ascent_and_guided_tokens_do_not_end_below_the_text(model, prose):
    for kind in ("ascent", "tokens"):
        study, lines = attack_model(model, prose, AttackPlan(kind, length=6, swaps=2, layers=[0]))
        sigma = study.largest("attention", 0)[0].value
        best = {line.name: line.value for line in lines}
        assert all(
            best[name] >= sigma * (1 - 1e-6)
            for name in {"in the ball", "near the text", "gradient"} & set(best)
        )


@pytest.mark.wide
def test_a_text_is_not_measured_with_a_seed_it_was_found_with(model, prose, monkeypatch):
    used = []

    def recording(J, tol=1e-6, *, gap=None, start=None, solver=None):
        used.append((J.batch, tol, None if solver is None else solver.seed))
        return spectral_norm(J, tol, gap=gap, start=start, solver=solver)

    for place in ("lipscope.probes.token_target", "lipscope.linalg.local"):
        monkeypatch.setattr(f"{place}.spectral_norm", recording)
    plan = AttackPlan("tokens", length=5, swaps=1, layers=[0], seed=3)
    study, lines = attack_model(model, prose, plan)
    last = [seed for _, _, seed in used[-len(lines) :]]
    searched = {seed for _, tol, seed in used if tol == 1e-2}
    assert last == [fresh_seed(3, "measure")] * 4 and searched == {3}
    assert [line.upper for line in attack_model(model, prose, plan)[1]] == [
        line.upper for line in lines
    ]
    assert len(study.certified) == 1 + len(lines)  # of the study that was made in memory too


@pytest.mark.parametrize("layer", [0, 1])
def test_the_slope_of_a_layers_sigma_in_embeddings_is_right(model, prose, layer):
    t, ids = layer_sigma(model, layer, tol=1e-9), torch.tensor(model.encode(prose)[:6])
    E = t.embedding[ids]
    value, gradient = t.slope(E)
    site = model.survey(ids).site("attention", layer)
    assert value == pytest.approx(local_lipschitz(site.f, site.X).value[0].item(), rel=1e-6)
    assert t.measure(ids[None])[0].item() == pytest.approx(value, rel=1e-6)
    D = torch.randn(E.shape, generator=torch.Generator().manual_seed(0), dtype=E.dtype)
    h = 1e-6
    difference = (t.slope(E + h * D)[0] - t.slope(E - h * D)[0]) / (2 * h)
    assert (gradient * D).sum().item() == pytest.approx(difference, rel=1e-4)


def test_the_change_of_the_output_is_that_of_the_model_and_its_slope_is_right(model, prose):
    ids = model.encode(prose)[:6]
    t, other = output_change(model, ids), [*ids[:2], 40, *ids[3:]]
    with torch.no_grad():
        one, two = (model.trunk(torch.tensor([text])).last_hidden_state for text in (ids, other))
    assert t.measure(torch.tensor([ids, other])).tolist() == pytest.approx(
        [0, (two - one).norm().item()], abs=1e-9
    )
    E, h = t.embedding[torch.tensor(other)], 1e-6
    value, gradient = t.slope(E)
    D = torch.randn(E.shape, generator=torch.Generator().manual_seed(0), dtype=E.dtype)
    difference = (t.slope(E + h * D)[0] - t.slope(E - h * D)[0]) / (2 * h)
    assert value == pytest.approx((two - one).norm().item())
    assert (gradient * D).sum().item() == pytest.approx(difference, rel=1e-4)


def test_special_tokens_are_not_put_into_a_text(model):
    vocabulary = layer_sigma(model, 0).vocabulary.tolist()
    assert not set(vocabulary) & set(model.tokenizer.all_special_ids) and len(vocabulary) == 130


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kind", "magic"], "no attack 'magic'"),
        (
            ["--kind", "tokens", "--length", "4", "--swaps", "5"],
            "cannot replace 5 tokens in a text of 4",
        ),
        (["--kind", "tokens", "--length", "4", "--swaps", "0"], "cannot replace 0"),
        (["--kind", "ascent", "--layers", "7"], "layer 7 does not exist"),
        ([], "kind"),
    ],
)
def test_bad_input_is_told_in_a_line(tiny, options, says, capsys):
    assert main(["attack", tiny, *options]) == 2
    assert says in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_told_in_a_line(tiny, prose, tmp_path, capsys):
    folder = tmp_path / "mismatched"
    shutil.copytree(tiny, folder)
    config = BertConfig.from_pretrained(folder)
    config.vocab_size = 60
    BertModel(config).save_pretrained(folder)
    text = tmp_path / "texts.txt"
    text.write_text("\n".join([prose, prose[::-1], prose[60:]]))
    given = [str(folder), "--kind", "tokens", "--text", str(text), "--length", "6"]
    assert main(["attack", *given]) == 2
    assert "which has 60 tokens; use the model's own tokenizer" in capsys.readouterr().err


def test_a_layer_that_does_not_exist_has_no_slope(model):
    with pytest.raises(UserError, match="layer 5 does not exist"):
        layer_sigma(model, 5)


@pytest.mark.wide
def test_token_attacks_keep_their_time_and_report_every_search(model, prose):
    seen = []
    start = time.monotonic()
    plan = AttackPlan("tokens", length=6, swaps=2, seconds=2.0)
    study, lines = attack_model(model, prose, plan, progress=lambda *at: seen.append(at))
    assert time.monotonic() - start < 6.0
    assert seen[0][0] == 0.0 and len(seen) >= 5 and seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(math.isfinite(line.value) for line in lines) and study.largest("attention", 1)
    with pytest.raises(UserError, match="seconds must be a positive number"):
        AttackPlan("tokens", seconds=0.0)


def test_ctrl_c_keeps_what_token_attacks_found(tiny, prose, tmp_path, capsys, monkeypatch):
    """The table and the study have the best text of the search that was stopped; exit code 130."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.txt").write_text(prose)

    def stopped(target, ids, swaps):
        found = guided_swaps(target, ids, swaps, width=4, sweeps=0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        return found

    monkeypatch.setitem(TOKEN_SEARCHES, "gradient", stopped)
    command = ["attack", tiny, "--kind", "tokens", "--text", "prose.txt", "--length", "6"]
    assert main([*command, "--swaps", "1", "--out", "study"]) == 130
    said = capsys.readouterr()
    assert "10 texts, stopped" in said.out and "Stopped; what was saved is kept" in said.err
    rows = [row for row in Study.open(tmp_path / "study").rows if row.probe.startswith(PROBE)]
    assert [row.probe for row in rows] == [f"{PROBE}tokens, gradient"]


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["construction", "tokens"])
def test_workers_and_shards_give_the_same_rows(kind, tiny, prose, tmp_path):
    plan = AttackPlan(kind, length=6, swaps=1)

    def rows(study):
        return [row._replace(seconds=0) for row in study.rows]

    whole, lines = attack_model(load(tiny), prose, plan)
    parallel = attack_model(load(tiny), prose, plan, workers=2)
    assert rows(parallel.study) == rows(whole) and parallel.lines == lines
    parts = [tmp_path / str(k) for k in (1, 2, 3)]
    for k, part in enumerate(parts, 1):
        attack_model(load(tiny), prose, plan, shard=(k, 3), out=part)
    merge(tmp_path / "all", parts)
    merged = Study.open(tmp_path / "all")
    assert rows(merged) == rows(whole) and not merged.unfinished
    seen = []
    again = attack_model(
        load(tiny), prose, plan, out=tmp_path / "all", progress=lambda *at: seen.append(at)
    )
    assert seen == [(0.0, 0)] and again.lines == lines  # nothing was left to do
