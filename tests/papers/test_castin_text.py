"""Figures on text: both statistics against dense Jacobians, real models by name, planted errors."""

import shutil
from itertools import cycle

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from lipscope import SelfAttention
from lipscope.models.embedded import default_text, folder
from lipscope.papers import castin_text
from lipscope.papers.castin_text import (
    BERT,
    DECODER,
    MEANT,
    RANDOM,
    RELEASED,
    judge_exponent,
    judge_plotted,
    judge_radius,
    layer_maps,
    measure_figure,
    released_statistic,
)
from lipscope.papers.claims import QUOTED, Quoted
from lipscope.papers.running import reproduce_papers
from lipscope.papers.setting import Setting

SIZES = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 12}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random weights saved under the names of the real models, in small shapes."""
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    bert = BertModel(BertConfig(**SIZES, intermediate_size=32, initializer_range=0.3))
    gpt2 = GPT2Model(
        GPT2Config(vocab_size=30522, n_embd=24, n_layer=4, n_head=12, initializer_range=0.3)
    )
    for name, module in (("bert-base-uncased", bert), ("gpt2", gpt2)):
        module.save_pretrained(place / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(folder() / file, place / name)
    return place


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    (place / "alice.txt").write_text(default_text()[:20_000])
    return place


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(castin_text, "SHORT_LENGTHS", (4, 8, 12))
    monkeypatch.setattr(castin_text, "FEW_WINDOWS", 2)


def test_the_released_statistic_against_the_dense_jacobian():
    torch.manual_seed(0)
    f = SelfAttention(*torch.randn(3, 4, 4, dtype=torch.float64))
    X = torch.randn(2, 3, 4, dtype=torch.float64)
    for x, found in zip(X, released_statistic(f, X, f(X)), strict=True):
        J = torch.autograd.functional.jacobian(f, x).reshape(12, 12)
        assert found.item() == pytest.approx((J.T @ f(x).flatten()).norm().sqrt().item())


def test_the_map_as_released_is_the_attention_sublayer_of_bert(models):
    model, stand_in = Setting(models=models).model("bert-base-uncased")
    assert not stand_in
    ids = torch.arange(100, 112)[None]
    site, residual = model.sites(ids, scopes=["attention", "residual"], layers=[2])
    released = layer_maps(model, site, BERT)[RELEASED](site.X)
    assert torch.allclose(released, residual.value(), atol=1e-10)


def test_the_decoder_is_called_without_its_mask_and_meant_with_it(models):
    model, _ = Setting(models=models).model("bert-base-uncased", causal=True)
    (site,) = model.sites(torch.arange(100, 112)[None], scopes=["attention"], layers=[0])
    maps = layer_maps(model, site, DECODER)
    changed = site.X.clone()
    changed[0, -1] += 1.0  # the last token, which the first may not see
    assert torch.equal(maps[MEANT](changed)[0, 0], maps[MEANT](site.X)[0, 0])
    assert not torch.allclose(maps[RELEASED](changed)[0, 0], maps[RELEASED](site.X)[0, 0])


def test_windows_do_not_overlap_and_sigma_is_that_of_a_dense_jacobian(models, texts, short):
    setting = Setting(quick=True, models=models, texts=texts)
    numbers = measure_figure(BERT, "alice", setting)
    points = numbers["points"]
    assert [(p["layer"], p["n"]) for p in points[:4]] == [(0, 4), (0, 4), (6, 4), (6, 4)]
    assert numbers["layers"] == [0, 2] and len(points) == 2 * 2 * 3
    model, _ = setting.model("bert-base-uncased")
    ids = model.encode((texts / "alice.txt").read_text(), special_tokens=True)
    second = torch.tensor(ids[2 * 4 : 2 * 4 + 8])[None]  # the first window of length 8
    (site,) = model.sites(second, scopes=["attention"], layers=[0])
    J = torch.autograd.functional.jacobian(site.f, site.X[0]).reshape(8 * 24, 8 * 24)
    expected = torch.linalg.matrix_norm(J, 2).item()
    (found, *_) = (p for p in points if (p["layer"], p["n"]) == (0, 8))
    assert found[f"sigma {MEANT}"] == pytest.approx(expected, rel=1e-4)
    assert found["rms"] == pytest.approx(site.X[0].square().sum(1).mean().sqrt().item())


@pytest.mark.wide
def test_real_names_give_real_verdicts_and_claims_share_a_measurement(
    models, texts, short, tmp_path
):
    only = ["C1", "C3", "C25", "C29"]
    outcomes = reproduce_papers(only=only, models=models, texts=texts, quick=True, out=tmp_path)
    words = [one.word for one in outcomes]
    assert all(word in ("REPRODUCED", "DIFFERS") for word in words)
    hashes = {one.record.used.get("bert-base-uncased") for one in outcomes} - {None}
    assert len(hashes) == 1 and hashes.pop().startswith("sha256 ")
    assert outcomes[1].record.numbers == outcomes[0].record.numbers
    assert outcomes[1].record.seconds < outcomes[0].record.seconds
    page = (tmp_path / "reproduce.html").read_text()
    assert "14.3 n^0.24" in page and "35.3 n^0.26" in page


def test_train_mode_differs_from_evaluation_and_its_dropout_is_undone(models, texts, short):
    setting = Setting(quick=True, models=models, texts=texts)
    points = measure_figure(RANDOM, "alice", setting)["points"]
    ratios = [p[f"statistic {castin_text.TRAIN}"] / p[f"statistic {RELEASED}"] for p in points]
    assert all(r > 0 for r in ratios) and max(abs(r - 1) for r in ratios) > 1e-3
    model, _ = setting.model("gpt2", random_init=0)
    assert not any(module.training for module in model.trunk.modules())


def points(law, statistic):
    """Windows at one layer whose constants follow given functions of n."""
    return {
        "points": [
            {
                "layer": 0,
                "n": n,
                "rms": 1 + 0.01 * i * n,
                "largest": 2.0,
                f"sigma {RELEASED}": law(n) * (1 + 0.01 * i),
                f"statistic {RELEASED}": statistic(n) * (1 + 0.01 * i),
            }
            for n in (4, 8, 16, 32, 64)
            for i in range(3)
        ]
    }


def test_an_exponent_is_judged_by_sigma_and_the_reason_is_the_statistic():
    quarter = points(lambda n: 14.3 * n**0.24, lambda n: n**0.3)
    assert judge_exponent(0, quarter, QUOTED["C1"]).holds
    flat = points(lambda n: 2.0, lambda n: 3 * n**0.24)
    verdict = judge_exponent(0, flat, QUOTED["C1"])
    assert not verdict.holds and "which contains the quoted exponent" in verdict.reason
    assert verdict.interval[0] <= 0 <= verdict.interval[1]
    flat["points"] = [p | {f"sigma {MEANT}": p["n"]} for p in flat["points"]]
    assert "σ as meant like n^1.00" in judge_exponent(0, flat, QUOTED["C1"]).reason
    neither = judge_exponent(0, points(lambda n: 2.0, lambda n: n), QUOTED["C1"])
    assert not neither.holds and "neither contains it" in neither.reason


def test_a_figure_shows_sigma_only_if_what_it_plots_is_sigma():
    assert judge_plotted(0, points(lambda n: n, lambda n: n), Quoted("")).holds
    assert not judge_plotted(0, points(lambda n: n, lambda n: 1.2 * n), Quoted("")).holds


def test_the_radius_is_judged_at_a_fixed_length():
    # sigma depends on n alone, and so does most of the radius: no effect of the radius is left.
    assert judge_radius(0, points(lambda n: n, lambda n: n), Quoted("")).holds
    numbers = points(lambda n: n, lambda n: n)
    # The scatter at one length is bent, without a slope in the radius.
    bent = cycle([1e-3, -2e-3, 1e-3])
    for p, scatter in zip(numbers["points"], bent, strict=False):
        p[f"sigma {RELEASED}"] = p["n"] ** 0.5 * (1 + scatter)
    verdict = judge_radius(0, numbers, Quoted(""))
    assert not verdict.holds and "no growth is established" in verdict.reason
    for p in numbers["points"]:
        p["rms"] = 27.7
    verdict = judge_radius(0, numbers, Quoted(""))
    assert not verdict.holds and "27.7 to 27.7 in all 15 windows" in verdict.reason


def test_planted_the_statistic_of_the_release_in_place_of_sigma_turns_a_verdict(
    models, texts, short, monkeypatch
):
    def run():
        (one,) = reproduce_papers(only=["C2"], models=models, texts=texts, quick=True)
        return one.word

    assert run() == "DIFFERS"

    class Planted:
        def __init__(self, value):
            self.value = value

    # What the released scripts do: the output of jvp is taken for its tangent.
    monkeypatch.setattr(
        castin_text,
        "local_lipschitz",
        lambda f, X, tol: Planted(released_statistic(f, X, f(X))),
    )
    assert run() == "REPRODUCED"
