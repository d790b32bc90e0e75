"""The page of a study as a file: what it says, what it holds, and what it never lets through."""

import base64
import hashlib
import json
import math
import random
import re
import zlib
from dataclasses import astuple
from html.parser import HTMLParser

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.report import study_charts
from lipscope.report.bounds import surrounded
from lipscope.report.content import Scale, Spread, heat, strips
from lipscope.report.document import as_json, packed
from lipscope.report.page import html, write_report
from lipscope.report.words import tiles
from tests.report.made import HOSTILE, bounded, failed, grid, study, worst_found
from tests.study.fakes import row
from tests.study.tiny import PROSE, save_tiny


class Skeleton(HTMLParser):
    """Elements and the names of their attributes; scripts, styles and text separately."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.ids: list[str] = []
        self.text, self.inside, self.policy = "", "", ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.ids += [value for name, value in attrs if name == "id"]
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
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")


def read(text: str) -> Skeleton:
    parser = Skeleton()
    parser.feed(text)
    return parser


def data_of(page: Skeleton) -> dict:
    (found,) = [text for attributes, text in page.scripts if attributes.get("id") == "data"]
    return json.loads(zlib.decompress(base64.b64decode(found)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return study(tmp_path_factory.mktemp("plain") / "s", grid())


@pytest.fixture(scope="module")
def page(plain):
    return read(html(plain))


def test_the_answers_stand_in_order_with_their_numbers(page):
    questions = ["How smooth", "Where is it most sensitive", "grow with length", "Which tokens"]
    questions += ["worst case", "How sure", "Every number"]
    places = [page.text.index(question) for question in questions]
    assert places == sorted(places)
    # Layer 1 at n = 32: samples 2 sqrt(32) and 1.1 times that, so the median is 1.05 times it.
    assert f"by a factor of up to {2 * math.sqrt(32) * 1.05:.1f}." in page.text
    assert f"single sample is {2 * math.sqrt(32) * 1.1:.2f}" in page.text
    assert "n⁰·⁵⁰" in page.text and "^" not in page.text.split("What was measured")[0]
    assert "head 0 of layer 1 (median σ = 11.9)" in page.text
    assert "All 36 upper bounds hold together with probability at least 1 - 3.6e-08." in page.text
    assert "no input was chosen with knowledge of the seed" in page.text
    for fact in ("fake/model", "w" * 64, "x" * 64, "float64", "cpu", "1e-06", "each head"):
        assert fact in page.text


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({}, ("within 1 %", "every σ, upper / lower")),
        ({"upper": math.inf}, ("lower bounds", "not every σ has both bounds")),
        ({"lower": 0.0}, ("upper bounds", "not every σ has both bounds")),
        ({"value": 0.0, "lower": 0.0, "upper": 0.0}, ("within 1 %", "every σ, upper / lower")),
    ],
)
def test_a_tile_says_what_bounds_there_are(tmp_path, bounds, says):
    made = study(tmp_path / "s", [row(), row(**{"sample": 1, **bounds})])
    assert tiles(made)[-1][1:] == says


def test_layers_are_ranked_by_their_median(page):
    # Layer 1 is twice as large as layer 0 everywhere.
    part = page.text[page.text.index("Layers by sensitivity") :]
    assert 0 < part.index("layer 1") < part.index("layer 0")


def test_one_statistic_has_one_name(tmp_path):
    """Layer 0 has the largest sample, layer 1 the largest median: each is called what it is."""
    values = {0: (1.0, 1.0, 9.0), 1: (4.0, 4.0, 4.0)}
    rows = [row(layer=k, sample=i, value=v) for k, vs in values.items() for i, v in enumerate(vs)]
    text = read(html(study(tmp_path / "s", rows))).text
    assert "the most sensitive layer (layer 1)" in text and "factor of up to 4.00" in text
    assert "largest σ of a single sample is 9.000 (layer 0" in text
    assert "Most sensitive: layer 1 (median σ = 4.00" in text
    ranked = text[text.index("Layers by sensitivity") :]
    assert ranked.index("layer 1") < ranked.index("layer 0") < ranked.index("[1.00, 9.00]")


def test_a_reference_gives_the_numbers_a_meaning(tmp_path, plain):
    smooth = [r._replace(value=r.value / 4, lower=0.0, upper=math.inf) for r in grid()]
    random_weights = study(tmp_path / "r", smooth, random_init=7)
    text = read(html(plain, random_weights)).text
    assert "σ is 4.00 times as large as in the reference, random weights (seed 7)" in text
    assert "median σ, random weights (seed 7)" in text and "--random-init" not in text
    assert "smaller by 4.00 than in the reference" in read(html(random_weights, plain)).text


def test_an_empty_section_names_the_command_that_fills_it(tmp_path):
    command = "lipscope measure some/model --text 'my text.txt' --lengths 8,16 --dtype float64"
    made = study(tmp_path / "here", grid(lengths=(8, 16, 128)), command=command)
    text = read(html(made)).text
    bounds = "lipscope bounds some/model --text 'my text.txt' --dtype float64 --lengths 16"
    assert f"{bounds} --out here" in text
    assert f"{command} --random-init 0 --out here-random" in text
    assert "lipscope report here here-random" in text and str(tmp_path) not in text


def test_a_study_of_embeddings_names_no_command(tmp_path):
    text = read(html(study(tmp_path / "s", grid(), command=""))).text
    assert "This command" not in text and "these commands" not in text


def test_bounds_of_a_study_with_special_tokens_go_elsewhere(tmp_path):
    command = "lipscope measure some/model --special-tokens"
    special = {"special_tokens": True}
    made = study(tmp_path / "here", grid(), identity=special, command=command)
    assert "lipscope bounds some/model --lengths 32 --out here-bounds" in read(html(made)).text


def test_the_first_token_is_explained_and_left_out(tmp_path, plain, page):
    # The fake norms grow with the position on the input side: token 31 leads.
    assert "attention sink" not in page.text
    rows = [row(n=4)]
    made = study(tmp_path / "s", rows, right=(0.96, 0.1, 0.2, 0.16))
    text = read(html(made)).text
    assert "(an attention sink)" in text
    rest = 0.1**2 + 0.2**2 + 0.16**2
    assert f"the input side reads “three” (token 2, {100 * 0.04 / rest:.1f} %)" in text


def test_only_what_is_in_the_file_may_run(plain):
    page = read(html(plain))
    (script,) = [text for attributes, text in page.scripts if "type" not in attributes]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    scripting = re.search(r"script-src ([^;]*)", page.policy).group(1)
    assert "unsafe" not in scripting and "http" not in page.policy
    assert not [
        name for _, names in page.tags for name in names if name.startswith("on") or name == "src"
    ]
    assert not {"form", "iframe", "img", "link", "object"} & {tag for tag, _ in page.tags}
    assert len(page.ids) == len(set(page.ids))


def test_hostile_words_leave_the_skeleton_as_it_is(tmp_path):
    evil = dict(
        zip(("model", "text", "architecture", "command"), (*HOSTILE[:3], HOSTILE[4]), strict=True)
    )
    calm = dict.fromkeys(evil, "plain words")
    rows = grid() + bounded(grid(), {HOSTILE[0]: 80.0})
    peaceful = grid() + bounded(grid(), {"a theorem": 80.0})
    hostile = study(tmp_path / "s", rows, HOSTILE, **evil)
    page, other = read(html(hostile)), read(html(study(tmp_path / "t", peaceful, **calm)))
    assert page.tags == other.tags
    for words in data_of(page)["tokens"]["words"].values():
        assert all(len(word) <= 40 and word.isprintable() for word in words)


def test_the_data_come_back_from_the_page():
    value = {"</script>": ["<!--", "&", "\u2028", "\ud800"]}
    text = packed(value)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert json.loads(zlib.decompress(base64.b64decode(text))) == value


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
    found = astuple(Spread.of(rows))
    assert found == (2.5, pytest.approx(2.4), 3.5, 1.0, 7.0, 4)


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ([0.0, 5.0, 10.0], [0, 16, 31]),
        ([1.0, 10.0, 100.0], [0, 16, 31]),
        ([2.0], [31]),
        ([0.0], [0]),
        ([math.inf, 1.0], [31, 31]),
    ],
)
def test_levels_of_colour(values, levels):
    scale = Scale.of(values)
    assert [scale.level(x) for x in values] == levels


def test_the_data_are_the_study(plain, page):
    data = data_of(page)
    assert data["heat"]["names"] == ["8", "16", "32"]
    text, colour, title = data["heat"]["frames"][2][1][3]
    assert (text, colour) == ("11.9", "c31") and title.startswith("layer 1, attention, n = 32\n")
    assert f"σ = {2 * math.sqrt(32) * 1.05:.2f}, median of 2 samples" in title
    assert data["heat"]["frames"][0][0][2] is None, "the gap between heads and scopes"
    assert data["table"]["count"] == len(plain.rows) == len(data["table"]["columns"]["value"])
    first = data["tokens"]["strips"][data["tokens"]["first"]]
    assert first["layer"] == "layer 1" and first["map"] == "attention"
    assert sum((x / 1000) ** 2 for x in first["right"]) == pytest.approx(1, abs=1e-2)
    maps = {(strip["layer"], strip["map"]) for strip in data["tokens"]["strips"]}
    assert len(maps) == 6 and ("layer 0", "heads, head 1") in maps


def test_a_length_that_some_maps_lack_keeps_its_cells(tmp_path):
    rows = [row(n=8), row("block", n=8), row(n=16)]
    found = heat(study(tmp_path / "s", rows))
    assert [[c.text for c in grid.cells[0]] for grid in found.grids] == [
        ["2.00", "2.00"],
        ["2.00", "–"],
    ]


def test_heads_are_left_out_where_they_would_fill_the_page(tmp_path, monkeypatch):
    made = study(tmp_path / "s", grid())
    assert len(strips(made)) == 6
    monkeypatch.setattr("lipscope.report.content.ALL_STRIPS", 150)
    assert len(strips(made)) == 4


def test_bounds_stand_around_their_own_sigma(tmp_path):
    rows = grid()
    around = {"bound: Castin et al., ball": 80.0, "bound: input-dependent": 12.0}
    found = study(tmp_path / "s", rows + bounded(rows, around) + worst_found(rows, 3.0))
    items = surrounded(found)
    assert [(item.sigma.layer, item.sigma.n) for item in items] == [(0, 32), (1, 32)]
    for item in items:
        assert [r.value / item.sigma.value for r in item.ball] == pytest.approx([80.0])
        assert [r.value / item.sigma.value for r in item.here] == pytest.approx([12.0])
        assert item.worst.value / item.sigma.value == pytest.approx(3.0)
    text = read(html(found)).text
    assert "has a σ 3.00 times that of the text in each of 2 maps" in text
    assert "at this text is 12.0 times σ" in text and "over all those inputs is 80.0" in text


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "No value has been measured yet."),
        ([failed()], "Every measurement failed"),
        (
            [row(layer=layer, value=2.0 + layer) for layer in range(3)],
            "A growth law needs at least 3 lengths",
        ),
        ([row(n=n, value=n**0.5) for n in (8, 16, 32)], "n⁰·⁵⁰"),
        ([row(n=n, value=2.0) for n in (8, 16, 32)], "n⁰·⁰⁰"),
        ([row(value=0.0, lower=0.0, upper=1e-9)], "by a factor of up to 0."),
        ([row(upper=math.inf)], "--gap iterates until there is one"),
        ([row(layer=None, scope="model", n=1)], "At 1 token of this text"),
    ],
    ids=["empty", "failed", "single n", "single layer", "flat", "zero", "no upper bound", "model"],
)
def test_odd_studies_make_sense(tmp_path, rows, says):
    text = read(html(study(tmp_path / "s", rows))).text
    assert says in text
    if rows and rows[0].failing:
        assert "out of <b>memory</b>" in text


def test_many_layers_and_heads_have_names_for_some(tmp_path):
    text = html(study(tmp_path / "s", grid(lengths=(8,), layers=60, heads=3)))
    assert text.count('class="cell ') == 2 * 60 * 4  # both widths
    assert "layer 58" in text and text.count('class="on ') == 0


def test_growth_of_many_layers_shows_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(study_charts, "MANY_CURVES", 3)
    rows = [row(layer=k, n=n, value=(k + 1.0) * n) for k in range(8) for n in (8, 16, 32)]
    growth = html(study(tmp_path / "s", rows)).split("Growth of every layer")
    assert "The 3 of 8 layers with the largest median σ." in growth[0]
    assert [f"layer {k}<" in growth[1] for k in range(8)] == [False] * 5 + [True] * 3


def test_a_report_is_whole_or_not_there(tmp_path, plain):
    path = write_report(plain, tmp_path / "r.html")
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert path.stat().st_size < 250_000
    with pytest.raises(UserError, match="cannot write"):
        write_report(plain, tmp_path / "nowhere" / "r.html")
    with pytest.raises(UserError, match="omit against"):
        write_report([plain, plain], tmp_path / "r.html", plain)
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_the_command_writes_one_or_shows_a_reference(tmp_path, capsys):
    for name in "ab":
        study(tmp_path / name, grid())
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["report", a]) == 0 and (tmp_path / "a" / "report.html").is_file()
    assert main(["report", a, b, "--out", str(tmp_path / "r.html")]) == 0
    assert "in the reference" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a study" in capsys.readouterr().err


def test_measure_writes_the_report_at_its_end(tmp_path, capsys):
    model, text = save_tiny(tmp_path / "tiny", layers=1), tmp_path / "prose.txt"
    text.write_text(PROSE)
    out = str(tmp_path / "s")
    code = main(["measure", model, "--text", str(text), "--lengths", "4,8", "--out", out])
    assert code == 0
    page = read((tmp_path / "s" / "report.html").read_text(encoding="utf-8"))
    assert "prose.txt" in page.text and data_of(page)["heat"]["names"] == ["4", "8"]


@pytest.mark.slow
def test_a_hundred_thousand_rows(tmp_path):
    """Random digits: made-up values that repeat would compress to nothing."""
    noise = random.Random(0)
    rows = [
        r._replace(
            value=(v := r.value * noise.uniform(0.5, 2)),
            lower=v * (1 - 10 ** noise.uniform(-12, -6)),
            upper=v * noise.uniform(1, 2),
            residual=10 ** noise.uniform(-9, -6),
            radius=noise.uniform(5, 20),
            seconds=noise.uniform(0.01, 1),
        )
        for r in grid(lengths=(8, 16, 32, 64, 128), layers=25, heads=19, samples=40)
    ]
    assert len(rows) == 100_000
    found = study(tmp_path / "s", rows)
    path = write_report(found, tmp_path / "r.html")
    assert path.stat().st_size < 5_000_000


@pytest.mark.wide
def test_an_unfinished_study_says_so(tmp_path, monkeypatch):
    made = study(tmp_path / "s", grid())
    assert "unfinished" not in html(made)
    monkeypatch.setattr(type(made), "unfinished", "18 of 42 jobs are done")
    assert "This study is unfinished: 18 of 42 jobs are done." in html(made)
