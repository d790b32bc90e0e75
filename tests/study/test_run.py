"""The main job on a tiny encoder: the numbers are true, and the same however they were come by."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BertModel

import lipscope as ls
from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
from lipscope.models.loading import load
from lipscope.models.sites import Site
from lipscope.study.probe import NUMERIC_VERSION, Place, Sigma, config_digest, start_probes
from lipscope.study.reading import SampledText
from lipscope.study.records import Row
from lipscope.study.run import measure
from lipscope.study.study import Study
from tests.naive import dense_jacobian
from tests.study.fakes import IDENTITY
from tests.study.printed import exported
from tests.study.tiny import save_tiny


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


INPUTS = SampledText((), (), 0, 0, "")
PROBES = {"sigma": Sigma(("attention",))}


@pytest.fixture
def identity(model):
    return replace(IDENTITY, config=config_digest(model), numeric_version=NUMERIC_VERSION)


def test_the_same_model_is_accepted_with_the_threads_of_the_worker(model, identity):
    work = start_probes(model.card, INPUTS, identity, PROBES, 3)
    assert work.model.card == model.card and work.probes == PROBES and work.threads == 3


def test_other_weights_configurations_and_versions_are_refused(model, identity):
    with pytest.raises(UserError, match="the worker has other weights of"):
        start_probes(replace(model.card, weights="0" * 64), INPUTS, identity, PROBES, 1)
    with pytest.raises(UserError, match="the worker has another configuration of"):
        start_probes(model.card, INPUTS, replace(identity, config="0" * 64), PROBES, 1)
    with pytest.raises(UserError, match="another version of lipscope; install the same"):
        start_probes(model.card, INPUTS, replace(identity, numeric_version=0), PROBES, 1)


def test_a_living_worker_loads_weights_that_were_rewritten_in_place(tmp_path, identity):
    """A worker keeps its model between studies; the name of the folder does not identify it."""
    folder = save_tiny(tmp_path / "model", layers=1)
    cards = []
    for scale in (1.0, 2.0, 1.0):
        rewritten = BertModel.from_pretrained(folder)
        with torch.no_grad():
            rewritten.embeddings.word_embeddings.weight.mul_(scale)
        rewritten.save_pretrained(folder)
        now = load(folder)
        identity = replace(identity, config=config_digest(now))
        work = start_probes(now.card, INPUTS, identity, PROBES, 1)
        again = start_probes(now.card, INPUTS, identity, PROBES, 1)
        expected = now.trunk.embeddings.word_embeddings.weight
        assert torch.equal(work.model.trunk.embeddings.word_embeddings.weight, expected)
        assert again.model is work.model
        cards.append(now.card)
    assert cards[0].weights != cards[1].weights
    # The folder now has the second weights again: a study of the first ones must not use them.
    with pytest.raises(UserError, match="the worker has other weights of"):
        start_probes(cards[0], INPUTS, identity, PROBES, 1)


def test_each_member_of_a_batch_has_the_radius_of_its_own_sample(model):
    """Two samples of different size in one batch: R is the longest token of each."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(2, 5, 4, generator=g, dtype=torch.float64) * torch.tensor([[[1.0]], [[7.0]]])
    f = ls.SelfAttention(*torch.randn(3, 4, 4, generator=g, dtype=torch.float64))
    site = Site("attention", 3, ((0, None), (1, None)), f, X)
    found = Sigma(("attention",))(Place(site, n=5, samples=(6, 9), model=model, inputs=INPUTS))
    rows = [one for one in found if isinstance(one, Row)]
    norms = [one for one in found if not isinstance(one, Row)]
    longest = [max(math.hypot(*token) for token in sample.tolist()) for sample in X]
    assert [row.radius for row in rows] == pytest.approx(longest, rel=1e-12)
    assert [(row.sample, row.layer, row.n) for row in rows] == [(6, 3, 5), (9, 3, 5)]
    dense = [torch.linalg.matrix_norm(dense_jacobian(f, x), 2).item() for x in X]
    assert [row.value for row in rows] == pytest.approx(dense, rel=1e-6)
    assert [entry.sample for entry in norms] == [6, 9]
