"""The page of verdicts: every claim, its figure with the paper's curve, and untrusted text."""

from dataclasses import replace

import pytest

from lipscope.papers.claims import Kind, Verdict
from lipscope.papers.page import Line, Picture, reproduction_html
from lipscope.papers.running import Outcome, Record
from tests.papers.planted import claim

PICTURE = Picture(
    title="Layer 0 over length",
    x="n, tokens",
    y="σ",
    lines=[
        Line("σ", [2, 8, 32], [1.0, 2.0, 4.0], spread=([0.9, 1.8, 3.5], [1.1, 2.2, 4.5])),
        Line("each window", [2, 8, 32], [1.1, 2.1, 3.9], "cloud"),
        Line("drawn in the paper", [2, 32], [1.5, 3.0], "dashes"),
    ],
    columns=["head", "γR²"],
    rows=[["0", "37.5"]],
)


def outcome(says="σ grows like n^0.24", reason="the statistic is another one", picture=PICTURE):
    verdict = Verdict(Kind.DIFFERS, False, (0.1, 0.2), reason)
    record = Record("C1", {}, True, 0, "cpu", 1.0, {"alice": f"sha256 {'0123456789ab' * 6}"[:71]})
    one = replace(claim(lambda setting: {}), says=says, plot=lambda numbers: picture)
    return Outcome(one, verdict, record)


def test_a_claim_has_its_verdict_interval_source_command_and_figure():
    html = reproduction_html([outcome()], "quick run")
    for text in (
        '<a href="#claim-C1">C1</a>',
        'id="claim-C1"',
        "DIFFERS: the statistic is another one. Interval: [0.100, 0.200].",
        "How smooth is attention? Source: released scripts of Castin et al. (2024), bert_encoder",
        "Needs: nothing. Run: quick, cpu, 1.0 s, seed 0; alice: sha256 0123456789ab….",
        "lipscope reproduce --only C1 --quick --text-dir DIR --out DIR",
        "drawn in the paper",
        "γR²",
        "<td>DIFFERS<br>[0.100, 0.200]</td>",
        "1 claims: 1 DIFFERS.",
    ):
        assert text in html, text
    assert html.count("<svg") == 2 and "http" not in html.split("</style>")[1].split("<script")[0]


def test_text_of_a_claim_cannot_become_html():
    html = reproduction_html([outcome("<script>x</script>", "<b>", Picture("t"))], "<i>")
    assert "<script>x" not in html and "<b>" not in html and "<i>" not in html


@pytest.mark.parametrize("style", ["points", "cloud", "line", "dashes"])
def test_every_style_can_be_drawn_on_every_scale(style):
    for log in ("xy", "x", "y", ""):
        picture = Picture("t", "x", "y", [Line("a", [1, 2, 3], [1.0, 3.0, 2.0], style)], log=log)
        html = reproduction_html([outcome(picture=picture)], "")
        marks = html.split('class="narrow"')[0].count('class="mark"')
        assert marks == (3 if style in ("points", "cloud") else 0)


def test_a_page_without_claims_says_so():
    assert "No claim was run." in reproduction_html([], "")
