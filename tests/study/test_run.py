"""The main job on a tiny encoder: the numbers are true, and the same however they were come by."""

import math
import re
from typing import Any

import pytest
import torch

from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
from lipscope.models.loading import load
from lipscope.study.probe import Sigma
from lipscope.study.run import measure
from lipscope.study.study import Study
from tests.study.printed import exported


@pytest.mark.wide
def test_every_number_is_the_norm_of_the_dense_jacobian(model, prose):
    study = measure(
        model, prose, (3, 6), 2, scopes=("heads", "attention", "residual", "block", "model")
    )
    assert len(study.rows) == 2 * 2 * (2 * (2 + 3) + 1) and not study.failed
    window = torch.tensor(model.encode(prose))
    for row in study.rows:
        tokens = [t.token for t in study.tokens_of(row)]
        ids = torch.tensor(model.encode(" ".join(tokens)))
        assert any(torch.equal(window[i : i + row.n], ids) for i in range(300))
        layers = None if row.layer is None else [row.layer]
        heads = None if row.head is None else [row.head]
        (site,) = model.sites(ids, scopes=[row.scope], layers=layers, heads=heads)
        truth = jacobian(site.f, site.X).to_dense()[0]
        U, S, Vh = torch.linalg.svd(truth)
        assert row.value == pytest.approx(S[0].item(), rel=1e-9)
        assert row.lower <= S[0].item() * (1 + 1e-13) <= row.upper * (1 + 1e-13)
        assert row.radius == pytest.approx(site.X[0].norm(dim=-1).max().item(), rel=1e-12)
        if S[1] < 0.98 * S[0]:
            right = Vh[0].reshape(row.n, -1).norm(dim=-1)
            left = U[:, 0].reshape(row.n, -1).norm(dim=-1)
            assert [t.right for t in study.tokens_of(row)] == pytest.approx(
                right.tolist(), abs=1e-4
            )
            assert [t.left for t in study.tokens_of(row)] == pytest.approx(left.tolist(), abs=1e-4)


def test_in_pieces_or_at_once_the_table_is_the_same(model, prose, tmp_path):
    asked: Any = {"lengths": (4, 8), "samples": 3, "tol": 1e-5, "seed": 3}
    whole = measure(model, prose, **asked)

    def stop_after(jobs):
        left = iter(range(jobs))

        def progress(done, total):
            if done and next(left, None) is None:
                raise KeyboardInterrupt

        return progress

    for jobs in (0, 1):
        with pytest.raises(KeyboardInterrupt) as stop:
            measure(model, prose, **asked, out=tmp_path / "s", progress=stop_after(jobs))
        assert "Run the same command again to resume" in stop.value.__notes__[0]
        assert 0 < len(Study.open(tmp_path / "s").rows) < len(whole.rows)
    study = measure(model, prose, **asked, out=tmp_path / "s")
    assert exported(study) == exported(whole)
    seen = []
    again = measure(
        model, prose, **asked, out=tmp_path / "s", progress=lambda done, total: seen.append(total)
    )
    assert seen == [0] and exported(again) == exported(whole)


@pytest.mark.wide
def test_workers_give_the_same_table(model, prose, tmp_path):
    asked: Any = {"lengths": (4, 8), "samples": 2}
    assert exported(measure(model, prose, **asked, workers=2, out=tmp_path / "s")) == exported(
        measure(model, prose, **asked)
    )


def test_a_study_grows_without_measuring_again(model, prose, tmp_path):
    first = measure(
        model, prose, (4,), 1, layers=(1,), heads=(1,), scopes=("heads",), out=tmp_path / "s"
    )
    assert [row[1:6] for row in first.rows] == [("heads", 1, 1, 4, 0)]
    second = measure(model, prose, (4, 6), 2, out=tmp_path / "s")
    assert len(second.rows) == 2 * 2 * 2 * 3
    assert first.rows[0] in second.rows  # seconds and all


def test_another_setting_is_another_study(model, prose, tmp_path, tiny):
    measure(model, prose, (4,), 1, out=tmp_path / "s")
    before = exported(Study.open(tmp_path / "s"))
    for other, told in (
        ({"tol": 1e-3}, "tol"),
        ({"seed": 1}, "seed"),
        ({"text": prose + " ba"}, "another text"),
        ({"special_tokens": True}, "special_tokens"),
        ({"model": load(tiny, random_init=1)}, "other weights"),
        ({"model": load(tiny, dtype="float32")}, "dtype"),
    ):
        with pytest.raises(UserError, match=told):
            measure(
                **{
                    "model": model,
                    "text": prose,
                    "lengths": (4,),
                    "samples": 1,
                    "out": tmp_path / "s",
                    **other,
                }
            )
    assert exported(Study.open(tmp_path / "s")) == before


def test_ids_without_lengths_are_measured_whole(model, prose):
    ids = model.encode(prose)
    study = measure(model, [ids[:4], ids[10:16], ids[20:24]], scopes=("attention",))
    assert {(row.n, row.sample) for row in study.rows} == {(4, 0), (6, 1), (4, 2)}
    windows = measure(model, ids, (5,), 2, scopes=("attention",))
    assert {(row.n, row.sample) for row in windows.rows} == {(5, 0), (5, 1)}
    one = measure(model, torch.tensor(ids[:4]), scopes=("attention",))
    first = [row for row in study.rows if row.sample == 0]
    assert [row.value for row in one.rows] == pytest.approx([row.value for row in first], rel=1e-10)


def test_embeddings_in_place_of_text(model, prose):
    ids = model.encode(prose)[:6]
    table = model.trunk.get_input_embeddings().weight
    study = measure(model, inputs=table[ids][None], scopes=("attention",))
    same = measure(model, [ids], scopes=("attention",))
    assert [row.value for row in study.rows] == pytest.approx(
        [row.value for row in same.rows], rel=1e-9
    )
    assert [t.token for t in study.tokens(0)] == [f"#{i}" for i in range(6)]


def test_special_tokens_frame_a_sample(model, prose):
    study = measure(model, prose, (6,), 1, scopes=("attention",), special_tokens=True)
    tokens = [t.token for t in study.tokens(0)]
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and len(tokens) == 6
    assert "[CLS]" not in [
        t.token for t in measure(model, prose, (6,), 1, scopes=("attention",)).tokens(0)
    ]


def test_a_study_without_upper_bounds_claims_no_confidence(tiny, prose):
    """Only float64 solves have an upper bound."""
    for dtype, bounded in (("float64", True), ("float32", False)):
        study = measure(load(tiny, dtype=dtype), prose, (4,), 1, [0], scopes=("attention",))
        assert all(math.isfinite(row.upper) == bounded for row in study.sigma)
        assert (study.info.about.confidence > 0.999) == bounded
        assert bounded or study.info.about.confidence == 0


def test_a_job_that_fails_is_a_row_that_says_why(model, prose, monkeypatch, tmp_path):
    def weak(probe, place):
        if place.site.layer == 1:
            raise MemoryError("no room\nfor this")
        return honest(probe, place)

    honest = Sigma.__call__
    monkeypatch.setattr(Sigma, "__call__", weak)
    study = measure(model, prose, (4,), 1, out=tmp_path / "s")
    assert {row.explained for row in study.failed} == {"failed: MemoryError: no room for this"}
    assert {row.layer for row in study.failed} == {1} and all(
        math.isnan(row.value) for row in study.failed
    )
    assert {row.layer for row in study.sigma} == {0}
    monkeypatch.undo()
    mended = measure(model, prose, (4,), 1, out=tmp_path / "s")
    assert not mended.failed and exported(mended) == exported(measure(model, prose, (4,), 1))


def test_a_live_module_stays_here_and_as_it_was(tiny, prose):
    from transformers import BertModel

    module = BertModel.from_pretrained(tiny).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    live = load(module, load(tiny).tokenizer)
    study = measure(live, prose, (4,), 1)
    assert exported(study) == exported(measure(tiny, prose, (4,), 1))
    assert module.training and all(
        torch.equal(before[name], t) for name, t in module.state_dict().items()
    )
    with pytest.raises(UserError, match="workers=1"):
        measure(live, prose, (4,), 1, workers=2)


def test_default_lengths_go_as_far_as_text_and_model(model, prose):
    lengths = lambda study: sorted({row.n for row in study.rows})  # noqa: E731
    assert lengths(measure(model, prose, samples=1, scopes=("attention",))) == [8, 16, 32]
    assert lengths(
        measure(model, " ".join(prose.split()[:20]), samples=1, scopes=("attention",))
    ) == [8, 16]


@pytest.mark.parametrize(
    ("layers", "heads", "words"),
    [(None, None, set()), ([1], None, {"--layers 1"}), (None, [0], {"--heads 0"})],
)
def test_the_recorded_command_names_layers_and_heads_that_were_chosen(
    model, prose, layers, heads, words
):
    study = measure(model, prose, [4], 1, layers, heads, ["heads"])
    options = re.findall(r"--(?:layers|heads) \S+", study.info.about.command)
    assert set(options) == words and " --scope heads" in study.info.about.command
