"""The page as a file: what it says, what it holds, and what it never lets through."""

import base64
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.report.comparison import comparison
from lipscope.report.content import cell, content
from lipscope.report.encoding import as_json
from lipscope.report.page import html, render
from lipscope.report.words import tiles
from tests.report.made import HOSTILE, bounded, failed, grid, study
from tests.study.fakes import row
from tests.study.tiny import PROSE, save_tiny


class Skeleton(HTMLParser):
    """Elements and the names of their attributes; scripts, styles and text separately."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.text, self.inside, self.policy = "", "", ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.inside != "style":
            self.text += data


def read(text: str) -> Skeleton:
    parser = Skeleton()
    parser.feed(text)
    return parser


def data_of(page: Skeleton) -> dict:
    (found,) = [
        text for attributes, text in page.scripts if attributes.get("type") == "application/json"
    ]
    return json.loads(found)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return study(tmp_path_factory.mktemp("plain") / "s", grid())


def test_the_answers_stand_in_order_with_their_numbers(plain):
    page = read(html([plain]))
    questions = [
        "How smooth",
        "Where is it most sensitive",
        "grow with length",
        "Which tokens",
        "worst case",
        "How sure",
    ]
    places = [page.text.index(question) for question in questions]
    assert places == sorted(places)
    # The largest sigma: layer 1, n = 32, sample 1: 2 sqrt(32) 1.1.
    assert f"{2 * math.sqrt(32) * 1.1:.4g}" in page.text
    assert "n^0.50" in page.text and "head 0 of layer 1" in page.text
    assert "All 36 upper bounds hold together with probability at least 1 - 3.6e-08." in page.text
    assert "no input was chosen with knowledge of the seed" in page.text
    for fact in (
        "fake/model",
        "w" * 64,
        "x" * 64,
        "float64",
        "cpu",
        "1e-06",
        "lipscope measure",
        "each head",
    ):
        assert fact in page.text


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({}, ("within ×1.01", "every σ, upper / lower")),
        ({"upper": math.inf}, ("lower bounds", "not every σ has both bounds")),
        ({"lower": 0.0}, ("upper bounds", "not every σ has both bounds")),
        ({"value": 0.0, "lower": 0.0, "upper": 0.0}, ("within ×1.01", "every σ, upper / lower")),
    ],
)
def test_a_tile_says_what_bounds_there_are(tmp_path, bounds, says):
    made = study(tmp_path / "s", [row(), row(**{"sample": 1, **bounds})])
    assert tiles(made)[-1][1:] == says


def test_only_what_is_in_the_file_may_run(plain):
    text = html([plain])
    page = read(text)
    run = [script for attributes, script in page.scripts if "type" not in attributes]
    assert len(run) == 2
    for script in run:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    scripting = re.search(r"script-src ([^;]*)", page.policy).group(1)
    assert "unsafe" not in scripting and "http" not in scripting
    assert not [
        name for _, names in page.tags for name in names if name.startswith("on") or name == "src"
    ]


def test_hostile_words_leave_the_skeleton_as_it_is(tmp_path, plain):
    evil = {
        "model": HOSTILE[0],
        "text": HOSTILE[1],
        "architecture": HOSTILE[2],
        "command": HOSTILE[4],
    }
    hostile = study(tmp_path / "s", grid(), HOSTILE, **evil)
    page, calm = read(html([hostile])), read(html([plain]))
    assert page.tags == calm.tags
    assert data_of(page)["studies"][0]["name"].startswith("</script>")
    for words in data_of(page)["studies"][0]["tokens"]["words"].values():
        assert all(len(word) <= 40 and word.isprintable() for word in words)


def test_text_cannot_end_its_script():
    text = as_json({"</script>": ["<!--", "&", "\u2028", "\ud800"]})
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == {"</script>": ["<!--", "&", "\u2028", "\ud800"]}


def test_numbers_read_back_to_six_digits():
    assert json.loads(as_json([1 / 3, math.inf, -math.inf, math.nan, 7, None])) == [
        0.333333, math.inf, -math.inf, None, 7, None,
    ]  # fmt: skip
    assert as_json([True, 1]) == "[true,1]"


def test_the_median_lies_in_its_interval():
    rows = [
        row(sample=i, value=v, lower=v - 0.1, upper=v + 1.0)
        for i, v in enumerate((3.0, 1.0, 2.0, 7.0))
    ]
    assert cell(rows) == [2.5, pytest.approx(2.4), 3.5, 1.0, 7.0, 4]


def test_the_data_are_the_study(plain):
    found = content(plain)
    table = found["heat"]
    assert table["columns"] == ["head 0", "head 1", " ", "attention"] and table["lengths"] == [
        8,
        16,
        32,
    ]
    assert table["cells"][2][1][3][0] == pytest.approx(2 * math.sqrt(32) * 1.05)
    assert found["table"]["count"] == len(plain.rows) == len(found["table"]["values"]["value"])
    (curve,) = [c for c in found["growth"] if (c["scope"], c["layer"]) == ("attention", "layer 0")]
    assert curve["law"][1] == pytest.approx(0.5) and curve["R"] == [3.0, 3.0, 3.0]
    strip = found["tokens"]["strips"][0]
    assert strip["n"] == 32 and len(found["tokens"]["words"][strip["words"]]) == 32
    assert sum(x * x for x in strip["right"]) == pytest.approx(1, abs=1e-2)


def test_bounds_stand_around_their_own_sigma(tmp_path):
    rows = grid()
    found = study(tmp_path / "s", rows + bounded(rows, {"kim2021": 80.0, "castin2024": 12.0}))
    items = content(found)["bounds"]
    assert [(item["layer"], item["n"]) for item in items] == [("layer 0", 32), ("layer 1", 32)]
    for item in items:
        assert {
            name: value / item["sigma"][0] for name, _, value in item["marks"]
        } == pytest.approx({"kim2021": 80.0, "castin2024": 12.0})
    assert "bound / σ = 12" in html([found])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "No value has been measured yet."),
        ([failed()], "Every measurement failed"),
        (
            [row(layer=layer, value=2.0 + layer) for layer in range(3)],
            "A growth law needs at least 3 lengths",
        ),
        ([row(n=n, value=n**0.5) for n in (8, 16, 32)], "n^0.50"),
        ([row(value=0.0, lower=0.0, upper=1e-9)], "by a factor of up to 0."),
        ([row(upper=math.inf)], "--gap iterates until there is one"),
    ],
    ids=["empty", "failed", "single n", "single layer", "zero", "no upper bound"],
)
def test_odd_studies_make_sense(tmp_path, rows, says):
    text = read(html([study(tmp_path / "s", rows)])).text
    assert says in text
    if rows and rows[0].failing:
        assert "out of <b>memory</b>" in text


def test_two_studies_are_compared(tmp_path, plain):
    other = study(
        tmp_path / "s",
        [r._replace(value=r.value / 2, lower=0.0) for r in grid()],
        model="fixed/model",
    )
    found = comparison(plain, other)
    assert found["n"] == 32
    assert all(
        ratio == pytest.approx(0.5)
        for line in found["ratios"]
        for ratio in line
        if ratio is not None
    )
    assert [len([r for r in line if r]) for line in found["ratios"]] == [3, 3]
    assert [line["alpha"][1][0] for line in found["lines"]] == pytest.approx([0.5] * 4)
    page = read(html([plain, other]))
    assert "σ of the second is 0.5 times" in page.text and "that differ: model name" in page.text
    assert page.text.count("fixed/model") >= 5 and len(data_of(page)["studies"]) == 2


def test_studies_without_a_common_length_say_so(tmp_path, plain):
    other = study(tmp_path / "s", grid(lengths=(4,)))
    assert "have no length in common" in read(html([plain, other])).text


def test_a_report_is_whole_or_not_there(tmp_path, plain):
    path = render(plain, tmp_path / "r.html")
    assert (
        path.read_text(encoding="utf-8").endswith("</html>\n") and path.stat().st_size < 6_000_000
    )
    with pytest.raises(UserError, match="cannot write"):
        render(plain, tmp_path / "nowhere" / "r.html")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_the_command_writes_one_or_compares_two(tmp_path, capsys):
    for name in "ab":
        study(tmp_path / name, grid())
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["report", a]) == 0 and (tmp_path / "a" / "report.html").is_file()
    assert main(["report", a, b]) == 0 and (tmp_path / "a" / "comparison.html").is_file()
    assert (
        main(["report", a, "--out", str(tmp_path / "r.html")]) == 0
        and (tmp_path / "r.html").is_file()
    )
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a study" in capsys.readouterr().err


def test_measure_writes_the_report_at_its_end(tmp_path, capsys):
    model, text = save_tiny(tmp_path / "tiny", layers=1), tmp_path / "prose.txt"
    text.write_text(PROSE)
    assert (
        main(
            [
                "measure",
                model,
                "--text",
                str(text),
                "--lengths",
                "4,8",
                "--out",
                str(tmp_path / "s"),
            ]
        )
        == 0
    )
    page = read((tmp_path / "s" / "report.html").read_text(encoding="utf-8"))
    assert "prose.txt" in page.text and data_of(page)["studies"][0]["heat"]["lengths"] == [4, 8]


@pytest.mark.slow
def test_a_hundred_thousand_rows(tmp_path):
    rows = grid(lengths=(8, 16, 32, 64, 128), layers=25, heads=19, samples=40)
    assert len(rows) == 100_000
    found = study(tmp_path / "s", rows)
    began = time.process_time()
    path = render(found, tmp_path / "r.html")
    assert time.process_time() - began < 10
    assert path.stat().st_size < 20_000_000
