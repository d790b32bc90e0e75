"""Studies compared: names that say what differs, ratios that are exact, differences in order."""

import io
import math

import pytest
from rich.console import Console

from lipscope._types import UserError
from lipscope.report.comparison import (
    MOST,
    compare,
    comparison_html,
    comparison_table,
    digest,
    names,
    shared,
    telling,
    verdict,
)
from tests.report.made import HOSTILE, failed, grid, study
from tests.report.test_page import data_of, read
from tests.study.fakes import row


def scaled(factor, rows=None):
    return [r._replace(value=r.value * factor, lower=0.0, upper=math.inf) for r in rows or grid()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    place = tmp_path_factory.mktemp("pair")
    made = study(place / "a", grid())
    smooth = study(place / "b", scaled(1 / 40), random_init=0)
    return [digest(made), digest(smooth)]


def text_of(table):
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return out.getvalue()


def test_two_studies_are_compared(pair):
    found = compare(pair)
    assert (found.n, len(found.maps)) == (32, 4)
    assert found.names == ["pretrained", "random weights (seed 0)"]
    assert found.mean(1) / found.mean(0) == pytest.approx(1 / 40)
    assert found.mean(0) == pytest.approx(math.sqrt(2) * math.sqrt(32) * 1.05)
    said = verdict(found)
    assert "“random weights (seed 0)” is 40.0 × smoother than “pretrained”" in said
    table = text_of(comparison_table(found))
    assert "2 studies: fake/model on a text, float64" in table and "0.0250" in table
    assert table.index("pretrained") < table.index("random weights")


def test_the_page_of_two(pair):
    page = read(comparison_html(pair))
    assert "pretrained against random weights (seed 0)" in page.text
    assert "40.0 × smoother" in page.text
    ratio = data_of(page)["ratio"]
    assert ratio["names"] == ["random weights (seed 0)"]
    cells = [cell for line in ratio["frames"][0] for cell in line if cell]
    assert [cell[0] for cell in cells] == ["0.025"] * 6 and {cell[1] for cell in cells} == {"v0"}
    assert len(page.ids) == len(set(page.ids))


def test_differences_come_in_order(tmp_path):
    rows = [row(layer=k, value=1.0) for k in range(3)]
    other = [row(layer=k, value=v) for k, v in enumerate((2.0, 1.1, 0.1))]
    found = compare([digest(study(tmp_path / "a", rows)), digest(study(tmp_path / "b", other))])
    assert [on[1] for on, _ in found.differences()] == [2, 0, 1]
    assert [ratio for _, ratio in found.differences()] == pytest.approx([10, 2, 1.1])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (grid(lengths=(4,)), "have no length in common, so that"),
        ([row("block", n=32)], "no map with a positive σ in common"),
        (grid(), "No difference in the geometric mean"),
        ([failed()], "have no length in common"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, other, says):
    digests = [digest(study(tmp_path / name, rows)) for name, rows in (("a", grid()), ("b", other))]
    assert says in read(comparison_html(digests)).text
    assert says in " ".join(text_of(comparison_table(compare(digests))).split())


def test_the_greatest_length_with_a_common_map_counts(tmp_path):
    digests = [
        digest(study(tmp_path / "a", [row(n=8), row("block", n=16)])),
        digest(study(tmp_path / "b", [row(n=8), row(n=16)])),
    ]
    assert compare(digests).n == 8


def test_a_name_says_what_differs_and_no_more():
    facts = {"model": "m", "weights": "pretrained", "text": "t", "dtype": "float64", "seed": "0"}
    others = [facts, {**facts, "dtype": "float32"}, {**facts, "text": "u", "dtype": "float32"}]
    assert telling(others) == ["text", "dtype"]
    assert names(others, ["", "", ""]) == ["t, float64", "t, float32", "u, float32"]
    # The seed tells nothing that the model does not tell.
    assert names([facts, {**facts, "model": "o", "seed": "1"}], ["", ""]) == ["m", "o"]
    assert names([facts, facts, facts], ["x", "y", "y"]) == ["m, x", "m, y (1)", "m, y (2)"]
    assert shared(others) == "m"
    random = {**facts, "weights": "random weights (seed 0)"}
    assert shared([random, {**random, "seed": "1"}]) == "m, random weights (seed 0) on t, float64"


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (
            ("/models/run/checkpoint-1", "/models/run/checkpoint-2"),
            ["checkpoint-1", "checkpoint-2"],
        ),
        (("/models/run", "/models/run/checkpoint-2"), ["run", "run/checkpoint-2"]),
        (("/models/a/x", "/data/b/x"), ["models/a/x", "data/b/x"]),
        (("/models/a", "org/name"), ["/models/a", "org/name"]),
        (("org/a", "org/b"), ["org/a", "org/b"]),
    ],
)
def test_folders_that_all_models_share_are_left_out(models, named):
    assert names([{"model": model} for model in models], ["", ""]) == named


def test_checkpoints_of_one_name_are_told_apart(tmp_path):
    made = [study(tmp_path / f"s{i}", grid(), identity={"weights": f"{i}" * 64}) for i in range(3)]
    assert compare(map(digest, made)).names == [f"weights {str(i) * 8}" for i in range(3)]


def test_hostile_names_are_text(tmp_path):
    made = [
        study(tmp_path / str(i), grid(), model=name) for i, name in enumerate((HOSTILE[0], "b"))
    ]
    page = read(comparison_html([digest(one) for one in made]))
    assert "window.broken" in page.text
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_many_studies_show_the_first_and_the_extremes(tmp_path):
    count = MOST + 8
    made = [
        digest(study(tmp_path / f"s{i:02}", scaled(1.1**i), identity={"seed": i}), cells=False)
        for i in range(count)
    ]
    found = compare(made)
    assert found.ranked() == list(range(count))[::-1]
    page = read(comparison_html(made))
    assert f"12 of {count} studies are drawn" in page.text
    legend = page.text[page.text.index("How does σ grow") : page.text.index("Where do they differ")]
    assert "seed 0" in legend and f"seed {count - 1}" in legend
    assert f"{count} studies" in page.text and page.text.count("seed 7") >= 2, "all in the table"


def test_a_study_without_values_does_not_spoil_the_rest(tmp_path):
    digests = [
        digest(study(tmp_path / name, rows))
        for name, rows in (("a", [failed()]), ("b", grid()), ("c", scaled(3)))
    ]
    found = compare(digests)
    assert (found.n, found.first, found.valued) == (32, 1, [1, 2])
    assert found.mean(0) is None and found.mean(2) / found.mean(1) == pytest.approx(3)
    page = read(comparison_html(digests))
    assert "“fake/model, b” is 3.00 × smoother than “fake/model, c”" in page.text
    assert "fake/model, a" in page.text and "fake/model, b (first)" in page.text


def test_one_study_is_no_comparison(tmp_path):
    with pytest.raises(UserError, match="at least two studies"):
        compare([digest(study(tmp_path / "a", grid()))])
