"""The tables of docs/error_budgets.md, made from the stored figures of the benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

FILES = [
    Path(__file__).parent / "results" / name
    for name in ("error_budgets_h200.json", "error_budgets_cpu.json")
]
"""Models trained on a GPU and measured there, and the embedded model on a CPU."""

PAGE = Path(__file__).parent.parent / "docs" / "error_budgets.md"
BEGIN, END = "<!-- generated: figures -->", "<!-- end of figures -->"
"""Between these lines the page is written by `write_page`."""

WORDS = {
    "claims": "**In short.** The smallest and the largest figure of all models, and whether they "
    "lie in the range that this project promises:",
    "runs": "**Correct runs** (`runs`): the smallest and the largest ratio over all hidden states.",
    "formats": "**Whole models** (`formats`): observed / predicted error of the last hidden state, "
    "64 probes at 8 sequences of 256 tokens (embedded: 4 of 64). The prediction itself has a "
    "standard deviation of about 3 % (4 %), except for bf16 and fp16.",
    "kl": "**Divergence** (`kl`): observed / predicted, in nats per token.",
    "scores": "**Scores** (`scores`): rank correlation with the truth, one layer or key-value head "
    "at a time, 128 probes; in brackets the median of score / truth.",
    "coverage": "**Intervals** (`coverage`): the share of 1,000 sets of 8 probes whose 95 % "
    "interval contains the exact first-order error.",
    "bugs": "**Planted bugs** (`bugs`) in bf16 ports; those within the budget change the output of "
    "their layer by less than rounding does.",
    "clean": "**Clean runs** (`clean`) of several texts, lengths, batch sizes, dtypes and "
    "attention implementations; 1 % of them may fail.",
    "cost": "**Cost** (`cost`): 8 probes and six formats, against rounding one layer at a time in "
    "six formats; memory of both against one training step.",
    "long": "**Long context** (`long`): keys and values of every head (kv8 and kv4, 4 probes) of a "
    "Llama of 4 layers with 12 heads, in float32.",
}

Results = dict[str, Any]


def stored() -> Results:
    """All stored figures by key, such as runs/llama/bf16/64."""
    return {
        key: value
        for path in FILES
        if path.exists()
        for key, value in json.loads(path.read_text()).items()
    }


def store(paths: Sequence[Path], cpu: bool = False) -> None:
    """Merge files of results into the stored figures of the GPU, or of the CPU.

    Figures of one model belong to one training: if a file has another training of a model, all
    older figures of that model go. Trainings of one seed count as one: sums on a GPU come in any
    order, and the last loss differs by up to 0.3 %.
    """
    place = FILES[cpu]
    kept = json.loads(place.read_text()) if place.exists() else {}
    for path in paths:
        new = json.loads(path.read_text())
        retrained = {
            key.split("/")[1]
            for key, value in new.items()
            if key.startswith("train/")
            and not math.isclose(kept.get(key, value)["last"], value["last"], rel_tol=5e-3)
        }
        kept = {k: v for k, v in kept.items() if k.split("/")[1] not in retrained} | new
    place.write_text(json.dumps(kept, indent=1) + "\n")


def write_page() -> None:
    """Replace the generated part of the page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{figures(stored())}\n\n{END}{tail}")


def figures(results: Results) -> str:
    """The generated part of the page: for each section what was measured, and its table."""
    return "\n\n".join(f"{WORDS[name]}\n\n{text}" for name, text in tables(results).items())


def tables(results: Results) -> dict[str, str]:
    """Every table for which there are figures, by section."""
    made = {section: make(results) for section, make in TABLES.items()}
    # Without figures a table is its head and the line below it.
    return {section: text for section, text in made.items() if text.count("\n") > 1}


def runs_table(results: Results) -> str:
    """Observed / predicted of correct runs, model by model."""
    lines = []
    for name, parts in _by_model(results, "runs"):
        every = [ratio for _, value in parts for ratio in value["ratios"]]
        trained = results.get(f"train/{name}")
        lines.append(
            (
                name,
                "–" if trained is None else f"{trained['last']:.2f}",
                ", ".join(map(str, sorted({int(key[1]) for key, _ in parts}))),
                str(len(parts)),
                str(len(every)),
                f"{min(every):.2f} to {max(every):.2f}",
            )
        )
    head = (
        "model", "loss, nats per byte", "n", "bf16 and fp16 runs", "hidden states",
        "observed / predicted",
    )  # fmt: skip
    return _table(head, lines)


def formats_table(results: Results, section: str = "formats") -> str:
    """Observed / predicted error of whole models, format by format."""
    found = {name: parts[0][1] for name, parts in _by_model(results, section)}
    formats = list(dict.fromkeys(f for value in found.values() for f in value))
    lines = [
        (name, *(f"{value[f]['observed / predicted']:.2f}" if f in value else "–" for f in formats))
        for name, value in found.items()
    ]
    return _table(("model", *formats), lines)


def scores_table(results: Results) -> str:
    """Rank correlation of every score with the truth; in brackets the median of score / truth."""
    names = (
        "weight error", "local output error", "kurtosis", "low entropy", "sigma", "Frobenius",
        "trace", "diagonal", "budget",
    )  # fmt: skip
    lines = []
    for name, parts in _by_model(results, "scores"):
        for (metric, *_), rows in parts:
            for format in dict.fromkeys(row["format"] for row in rows):
                cells = {row["score"]: row for row in rows if row["format"] == format}
                lines.append((name, metric, format, *(_score(cells.get(score)) for score in names)))
    return _table(("model", "metric", "format", *names), lines)


def _score(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['rank']:.2f}" + ("" if row["scale"] is None else f" ({row['scale']:.2g})")


def coverage_table(results: Results) -> str:
    """Share of intervals that contain the exact first-order error."""
    found = {name: parts[0][1] for name, parts in _by_model(results, "coverage")}
    formats = list(dict.fromkeys(f for value in found.values() for f in value))
    lines = [(name, *(f"{v[f]['inside']:.1%}" for f in formats)) for name, v in found.items()]
    return _table(("model", *formats), lines)


def bugs_table(results: Results) -> str:
    """Planted bugs: named where they are, not above the noise, or missed."""
    lines = []
    for name, parts in _by_model(results, "bugs"):
        kinds = [bug_outcome(bug) for bug in parts[0][1].values()]
        counts = (str(kinds.count(kind)) for kind in BUGS)
        lines.append((name, str(len(kinds)), *counts))
    return _table(("model", "planted", *BUGS), lines)


BUGS = ("named at its layer", "named at another layer", "within the budget")


def bug_outcome(bug: dict[str, Any]) -> str:
    """What became of a planted bug; one of the whole model acts at the embeddings or in layer 0."""
    if bug["named"] is None:
        return BUGS[2]
    places = ["embeddings", "layer 0"] if bug["layer"] is None else [f"layer {bug['layer']}"]
    return BUGS[0] if bug["named"] in places else BUGS[1]


def clean_table(results: Results) -> str:
    """Correct runs that were called wrong."""
    lines = []
    for name, parts in _by_model(results, "clean"):
        runs, alarms = (sum(value[key] for _, value in parts) for key in ("runs", "alarms"))
        worst = max(value["largest ratio / limit"] for _, value in parts)
        lines.append((name, str(runs), str(alarms), f"{alarms / runs:.1%}", f"{worst:.2f}"))
    return _table(("model", "clean runs", "alarms", "rate", "largest ratio / limit"), lines)


def cost_table(results: Results) -> str:
    """8 probes and six formats against one layer at a time in six formats."""
    lines = []
    for name, ((_, value), *_) in _by_model(results, "cost"):
        lines.append(
            (
                name,
                f"{value['probing s']:.2f}",
                f"{value['one at a time s']:.1f}",
                f"{value['ratio']:.1f}",
                *(_gib(value[key]) for key in ("peak bytes", "peak bytes of a training step")),
            )
        )
    head = (
        "model", "8 probes, s", "one layer at a time, s", "ratio", "GiB", "GiB, training step"
    )  # fmt: skip
    return _table(head, lines)


def _gib(memory: int | None) -> str:
    return "–" if memory is None else f"{memory / 2**30:.2f}"


def long_table(results: Results) -> str:
    """Time and memory of the budgets of keys and values."""
    lines = [
        (
            f"{value['n']:,}",
            str(value["heads"]),
            f"{value['seconds']:.1f}",
            f"{value['GiB']:.1f}",
            f"{value['bytes per token']:,.0f}",
        )
        for key, value in results.items()
        if key.startswith("long/")
    ]
    return _table(
        ("tokens", "heads of keys and values", "seconds", "GiB", "bytes per token"), lines
    )


def claims_table(results: Results) -> str:
    """What the project promises, the range that was measured, and whether it holds."""
    lines = []
    for what, values, low, high in _claims(results):
        if values:
            least, most = min(values), max(values)
            promised = f"{low:g} to {high:g}" if high < float("inf") else f"at least {low:g}"
            holds = "yes" if low <= least and most <= high else "no"
            lines.append((what, promised, f"{least:.3g} to {most:.3g}", str(len(values)), holds))
    return _table(("what", "promised", "measured", "figures", "holds"), lines)


def _claims(results: Results) -> Iterable[tuple[str, list[float], float, float]]:
    """(what, values, lowest, highest allowed)."""
    endless = float("inf")

    def ratios(section: str, *formats: str) -> list[float]:
        return [
            cell["observed / predicted"]
            for _, ((_, value), *_) in _by_model(results, section)
            for f, cell in value.items()
            if f in formats
        ]

    def ranks(metric: str, caches: bool) -> list[float]:
        return [
            row["rank"]
            for _, parts in _by_model(results, "scores")
            for (its, *_), rows in parts
            for row in rows
            if its == metric
            and row["score"] == "budget"
            and row["format"].startswith("kv") == caches
        ]

    states = [
        ratio
        for _, parts in _by_model(results, "runs")
        for _, value in parts
        for ratio in value["ratios"]
    ]
    inside = [
        cell["inside"]
        for _, ((_, value), *_) in _by_model(results, "coverage")
        for cell in value.values()
    ]
    cleans = [value for _, parts in _by_model(results, "clean") for _, value in parts]
    runs = sum(value["runs"] for value in cleans)
    alarms = [sum(value["alarms"] for value in cleans) / runs] if runs else []
    costs = [value["ratio"] for _, ((_, value), *_) in _by_model(results, "cost")]
    ratio = "observed / predicted"
    yield f"{ratio}, bf16 and fp16, every hidden state", states, 0.85, 1.15
    yield f"{ratio}, bf16, int8 and fp8", ratios("formats", "bf16", "int8", "fp8"), 0.9, 1.1
    yield f"{ratio}, int4:32", ratios("formats", "int4:32"), 0.8, 1.2
    yield f"{ratio}, kl, int8 and int6:32", ratios("kl", "int8", "int6:32"), 0.8, 1.25
    yield "rank correlation of layers, output", ranks("output", False), 0.95, endless
    yield "rank correlation of layers, kl", ranks("kl", False), 0.9, endless
    yield "rank correlation of key-value heads", ranks("output", True), 0.9, endless
    yield "share of intervals with the first-order error inside", inside, 0.93, 0.97
    yield "false alarms, all clean runs", alarms, 0.0, 0.01
    yield "cost of one layer at a time / cost of 8 probes", costs, 10.0, endless


def _by_model(results: Results, section: str) -> list[tuple[str, list[tuple[list[str], Any]]]]:
    """By model, the rest of each key after the name, and the figures."""
    found: dict[str, list[tuple[list[str], Any]]] = {}
    for key, value in results.items():
        its, *rest = key.split("/")
        if its == section:
            found.setdefault(rest[0], []).append((rest[1:], value))
    return list(found.items())


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(row) + " |" for row in (head, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


TABLES: dict[str, Callable[[Results], str]] = {
    "claims": claims_table,
    "runs": runs_table,
    "formats": formats_table,
    "kl": lambda results: formats_table(results, "kl"),
    "scores": scores_table,
    "coverage": coverage_table,
    "bugs": bugs_table,
    "clean": clean_table,
    "cost": cost_table,
    "long": long_table,
}
