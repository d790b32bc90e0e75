"""Every public result is short in a console and a plain table in a notebook."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import lipscope as ls
from lipscope._display import Displayed, html_table, short, text_table
from lipscope.models.sites import Site
from lipscope.probes.attack import AttackedModel, Line
from lipscope.probes.bounds import Audit

HOSTILE = '<img src=x onerror="alert(1)">'


@dataclass(frozen=True, eq=False)
class Held(Displayed):
    name: str
    X: Tensor
    scale: float = 1.0
    also: Tensor | None = None
    many: list[int] = field(default_factory=list)
    _hidden: int = field(default=0, repr=False)


@dataclass(frozen=True, eq=False)
class Spoken(Held):
    @property
    def summary(self) -> str:
        return f"a sentence about {self.name}"


class Tags(HTMLParser):
    """Collects the tags, and fails on one that is not closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert not attrs, attrs
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_fields_with_their_default_are_left_out():
    one = Held("it", torch.zeros(3, 4))
    assert repr(one) == "Held(name='it', X=float32[3, 4])"
    full = Held("it", torch.zeros(2), scale=1 / 3, also=torch.ones(1, 9), many=[1], _hidden=3)
    expected = "Held(name='it', X=[0, 0], scale=0.333333, also=float32[1, 9], many=[1])"
    assert repr(full) == expected


def test_a_summary_stands_for_the_fields():
    one = Spoken("it", torch.zeros(3, 4))
    assert repr(one) == "Spoken: a sentence about it"
    assert "a sentence about it" in one._repr_html_() and "float32[3, 4]" in one._repr_html_()


def test_names_cannot_inject_html():
    for text in (
        Held(HOSTILE, torch.zeros(1))._repr_html_(),
        Spoken(HOSTILE, torch.zeros(1))._repr_html_(),
        html_table((HOSTILE,), [(HOSTILE,)]),
    ):
        assert "img" not in Tags(text).seen


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2.5), "2.5"),
        (torch.zeros(6, dtype=torch.bool), "[False, False, False, False, False, False]"),
        (torch.zeros(7), "float32[7]"),
        (torch.zeros(0, 3), "float32[0, 3]"),
        (torch.zeros(2, device="meta"), "float32[2] on meta"),
        (torch.zeros(3).numpy(), "float32[3]"),
        ([1.0, float("inf")], "[1, inf]"),
        (tuple(range(9)), "9 entries"),
        ({"a": 0.1}, "{'a': 0.1}"),
        (dict.fromkeys(range(7), 0), "7 entries"),
        (ls.Status.MAX_STEPS, "max_steps"),
        ("a" * 3, "'aaa'"),
        (None, "None"),
    ],
)
def test_short(value, expected):
    assert short(value).startswith(expected)


def test_text_table():
    assert text_table([("a", "bc"), ("def", "")]) == "a    bc\ndef"


def results() -> dict[str, object]:
    """Every kind of public result, small."""
    torch.manual_seed(0)
    I = torch.eye(2, dtype=torch.float64)
    f, big = ls.SelfAttention(-I, I, I), ls.SelfAttention(*torch.randn(3, 16, 32).double())
    X = torch.randn(64, 32, dtype=torch.float64)
    line = ls.SelfAttention(*(torch.tensor([[x]]).double() for x in (-1.0, 1.0, 1.0)))
    mu = ls.mean_field.DiscreteMeasure.uniform(X)
    clusters = ls.simulate("clusters", n=12, time=1.0)
    gaussian = ls.simulate("gaussian", n=12, time=0.5)
    growth = ls.simulate("growth", n=4, time=0.2)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = ls.SmoothnessMonitor(layer, every=1)
    tokens = X[None, :5, :8].float()
    layer(tokens, tokens, tokens)
    monitor.step()
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = ls.load(LlamaModel(config), random_init=0)
    study = ls.measure(model, torch.arange(64), lengths=[4, 8], samples=1, layers=[0])
    attacked = Line(layer=0, n=4, name="ascent", value=2.0, lower=1.9, upper=2.1, detail="")
    residual = ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(8, heads=2, constant=0.5))
    converted = ls.convert_model(LlamaModel(config), "l2", torch.arange(8)[None])
    found = {
        "layer": big,
        "heads apart": big.heads_apart(),
        "rope": ls.Dot(rope=ls.Rope.standard(99, 8)),
        "point": ls.Point(X),
        "around": ls.Around(X, 0.1),
        "normed": ls.Normed(torch.ones(99), n=4),
        "operator": ls.jacobian(big, X),
        "estimate": ls.local_lipschitz(big, X),
        "batch": ls.local_lipschitz(big, X.expand(9, 64, 32)),
        "bounds": ls.bounds(f, ls.Ball(R=1.0, n=4)),
        "found": ls.attack.ascend(big, ls.Ball(2.0, 8), ls.attack.Climb(steps=1, restarts=1)),
        "response": ls.attack.singular_response(big, X),
        "measure": mu,
        "two Diracs": ls.mean_field.two_diracs(f, 2.0),
        "transition": ls.mean_field.transition(line, 1.0, 1000.0),
        "splitting": ls.mean_field.splitting(big, X),
        "splitting map": ls.mean_field.splitting_map(line, torch.linspace(-2, 2, 9)),
        "largest gain": ls.mean_field.largest_gain(f, 2, 1.0, tries=2),
        "clusters": clusters,
        "flow": clusters.flow,
        "what was found": clusters.found,
        "gaussian": gaussian,
        "moments": gaussian.found,
        "gaussian flow": gaussian.found.closed,
        "growth": growth,
        "depth growth": growth.found,
        "monitor": monitor,
        "reading": monitor.readings[0],
        "model": model,
        "site": model.sites(torch.arange(8), scopes=["heads"])[0],
        "study": study,
        "audit": Audit(study, {"a theorem": "a hypothesis"}),
        "attacks": AttackedModel(study, [attacked]),
        "inverse": residual.inverse(X[:4, :8].float()),
        "log det": residual.log_det(X[:4, :8].float()),
        "conversion": converted,
    }
    assert isinstance(found["site"], Site)
    return found


@pytest.mark.wide
def test_every_public_result_is_short_and_a_table_in_a_notebook():
    found = results()
    for name, result in found.items():
        text = repr(result)
        assert len(text) < 700 and text.count("\n") < 12, (name, text)
        assert not re.search(r"tensor\(|object at 0x", text), (name, text)
        assert text.startswith(type(result).__name__) or "\n" in text, (name, text)
        if hasattr(result, "_repr_html_"):
            html = result._repr_html_()
            assert Tags(html).seen & {"table", "pre"} and len(html) < 10_000, (name, html)
    plain = {name for name, result in found.items() if not hasattr(result, "_repr_html_")}
    assert plain == {"operator", "largest gain", "reading", "model"}


def test_bounds_are_a_table():
    I = torch.eye(2, dtype=torch.float64)
    rows = ls.bounds(ls.SelfAttention(I, I, I), ls.Ball(R=1.0, n=4))
    lines = repr(rows).splitlines()
    assert lines[0].split() == ["bound", "kind", "norm", "value", "source"]
    assert [line.split("  ")[0] for line in lines[1:-1]] == [row.name for row in rows]
    assert lines[-1] == f"{len(rows.not_offered)} theorems not applicable: see not_offered"
    html = rows._repr_html_()
    assert all(row.where.split("'")[0] in html for row in rows)
    assert html.count("<tr>") == 2 + len(rows) + len(rows.not_offered)
    rows.not_offered.clear()
    assert "not applicable" not in repr(rows) + rows._repr_html_()
