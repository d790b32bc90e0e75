"""Attacks at equal norm on a tiny model: norms agree, small steps are ordered."""

import csv

import matplotlib
import pytest
import torch

from benchmarks.attack_comparison import (
    DIRECTION,
    GRADIENT,
    RANDOM,
    SHARES,
    TOKENS,
    Settings,
    Trial,
    compare_attacks,
    main,
)
from lipscope._types import UserError
from lipscope.probes.token_target import TextReader, sentence_embedding
from tests.study.conftest import model, prose, tiny

__all__ = ["model", "prose", "tiny"]

matplotlib.use("Agg")
pytestmark = pytest.mark.wide

SETTINGS = Settings(swaps=2, length=6)
SMALL, LARGE = (1e-5, 3e-5), 300.0
"""Fractions of a swap's norm at which the model is linear, and at which the text is lost."""


@pytest.fixture(scope="module")
def texts(prose):
    words = prose.split()
    return [" ".join(words[i : i + 8]) for i in range(0, 32, 8)]


@pytest.fixture(scope="module")
def trials(model, texts) -> list[Trial]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.attack_comparison.SHARES", (*SMALL, LARGE))
        return compare_attacks(model, texts, SETTINGS)


def test_every_attack_has_every_norm_and_norms_agree(trials, texts):
    sizes = {(t.text, t.attack, t.budget): t.norm for t in trials}
    budgets = (*SMALL, LARGE, 1, 2)
    assert set(sizes) == {
        (i, attack, b)
        for i in range(len(texts))
        for attack in (TOKENS, DIRECTION, GRADIENT, RANDOM)
        for b in budgets
        if attack != TOKENS or b in (1, 2)
    }
    for i in range(len(texts)):
        for b in budgets:
            norm = sizes[i, TOKENS, b] if b in (1, 2) else b * sizes[i, TOKENS, 1]
            for attack in (DIRECTION, GRADIENT, RANDOM):
                assert sizes[i, attack, b] == pytest.approx(norm, rel=1e-6)


def test_small_steps_order_the_attacks_and_grow_in_proportion(trials):
    change = {(t.text, t.attack, t.budget): t.change for t in trials}
    for i in {t.text for t in trials}:
        for r in SMALL:
            assert change[i, DIRECTION, r] == pytest.approx(change[i, GRADIENT, r], rel=1e-2)
            assert change[i, DIRECTION, r] > change[i, RANDOM, r] > 0
        assert change[i, GRADIENT, 3e-5] == pytest.approx(3 * change[i, GRADIENT, 1e-5], rel=0.05)


def test_the_reader_gives_what_the_model_gives_with_special_tokens(model, texts):
    ids = model.encode(texts[0])[:6]
    reader = TextReader(model, 6, (2,), (3,))
    framed = torch.tensor([[2, *ids, 3]])
    with torch.no_grad():
        truth = model.trunk(framed).last_hidden_state
    assert torch.allclose(reader.hidden_of(torch.tensor([ids])), truth, atol=1e-10)
    mean = truth.mean(dim=1)
    assert torch.allclose(sentence_embedding(truth), mean / mean.norm(), atol=1e-12)


def test_the_script_prints_the_table_and_keeps_numbers_and_figure(tiny, texts, tmp_path, capsys):
    file = tmp_path / "texts.txt"
    out = tmp_path / "out"
    file.write_text("\n\n".join(texts[:3]))
    options = ["--text", str(file), "--length", "6", "--swaps", "1", "--out", str(out)]
    main(["--model", tiny, *options])
    printed = capsys.readouterr().out
    assert TOKENS in printed and "of 3" in printed
    with (out / "attacks.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 3 * (3 * (len(SHARES) + 1) + 1) and set(rows[0]) == set(Trial._fields)
    assert (out / "attacks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "swaps", "says"),
    [
        ("ba\nce\nba", 1, "at least 3 different texts, got 2"),
        ("ba ce di\nba\nfo gu ha", 2, "'ba' has too few tokens to replace 2"),
        ("ba\nce\ndi", 9, "cannot replace 9 tokens in a text of 8"),
    ],
)
def test_bad_input_is_told_in_a_line(model, lines, swaps, says):
    with pytest.raises(UserError, match=says):
        compare_attacks(model, lines.split("\n"), Settings(swaps, 8))
