"""The pages of the survey: docs/models.md, and the totals in docs/supported.md."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import transformers

from lipscope.models._transformers_internals import CONFIG_MAPPING

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks/results/survey_cpu.json"
ARCHITECTURES = ROOT / "docs/models.md"
SUPPORTED = ROOT / "docs/supported.md"
BEGIN, END = "<!-- generated: survey -->", "<!-- end of survey -->"

RANGE = (0.8, 1.25)
"""What observed / predicted must lie in for bf16."""

TWICE = 2
"""A budget in int8 or kv4 that is off by this factor must have warned."""

Rows = dict[str, dict[str, Any]]

MISFIT = (
    "size of tensor|split_with_sizes|shape '|shapes cannot|expected input|doesn't match model|"
    "out of range|repeat_interleave|without overflow|`sliding_window`"
)
"""What a model says when its small sizes do not fit together; its own may well do."""

WHY = {
    "sizes in floating point": "computes sizes in floating point: rounding cannot be probed",
    "no trunk": "part of another model, or a task without hidden states",
    "lipscope's attention": "attention that lipscope cannot replace, and no scope around it",
    "own attention code": "attention that lipscope cannot replace, and no scope around it",
    "map of a single sequence": "attention that lipscope cannot replace, and no scope around it",
    "cuts a sample": "no sequences of tokens inside: convolutions, windows",
    "non-finite": "values that are not finite with small random weights",
    "does not run on": "needs more inputs: give them all with `inputs=`",
    "not tokens; in Python": "reads sound or something else: give it with `inputs=`",
    "not sequences": "no sequences of tokens inside: convolutions, windows",
    "concatenates": "no sequences of tokens inside: convolutions, windows",
    "cannot find its blocks": "no list of blocks",
    "its encoder": "an encoder that cannot be run alone",
    "hidden states": "no hidden states",
}
"""Groups of refusals, by a piece of the sentence; the first that matches."""


def stored() -> Rows:
    """The results that are kept, by name."""
    rows = json.loads(STORED.read_text()) if STORED.exists() else []
    return {row["name"]: row for row in rows}


def write_pages(found: Rows) -> None:
    """Write the page of architectures, and the totals of budgets into the page of support."""
    ARCHITECTURES.write_text(page(found))
    text = SUPPORTED.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    SUPPORTED.write_text(f"{text[:start]}\n\n{totals(found)}\n\n{text[end:]}")


def page(found: Rows) -> str:
    """docs/models.md: what was measured and what was not, and every budget."""
    counts = Counter(row["outcome"] for row in found.values())
    measured, refused = defaultdict(list), defaultdict(list)
    for name, row in sorted(found.items()):
        if row["outcome"] == "refused" and re.search(MISFIT, row["reason"]):
            counts.subtract(["refused"])
            counts.update(["not built"])
            continue
        if row["outcome"] == "measured":
            measured[", ".join(row["scopes"])].append(f"`{name}`")
        elif row["outcome"] == "refused":
            why = [group for piece, group in WHY.items() if piece in row["reason"]]
            refused[(why or ["another reason"])[0]].append(f"`{name}`")
    return PAGE.format(
        version=transformers.__version__,
        names=len(list(CONFIG_MAPPING)),
        total=len(found),
        measured=counts["measured"],
        refused=counts["refused"],
        crashed=counts["crashed"] + counts["slow"],
        not_built=counts["not built"],
        table=_groups("scopes", measured),
        totals=totals(found),
        budgets=_budgets(found),
        reasons=_reasons(found),
        refusals=_groups("why", refused),
    )


def totals(found: Rows) -> str:
    """How many architectures have each budget and verdict."""
    rows = [row["budgets"] for row in found.values() if "budgets" in row]
    seen = {cell: Counter(row[cell]["outcome"] for row in rows) for cell in CELLS}
    ratios = [row["bf16"]["ratio"] for row in rows if row["bf16"]["outcome"] == "stated"]
    inside = sum(RANGE[0] <= ratio <= RANGE[1] for ratio in ratios)
    lines = [f"| of {len(rows)} architectures that `measure` measures | |", "|---|---|"]
    for cell in ("bf16", "int8", "kv4"):
        words = f"{seen[cell]['stated']} stated, {seen[cell]['refused']} refused with a sentence"
        lines.append(f"| `error_budget`, {cell} | {words}{_failures(seen[cell])} |")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "none"
    lines.append(
        f"| observed / predicted, bf16 | {spread}; {inside} of {len(ratios)} between "
        f"{RANGE[0]} and {RANGE[1]} |"
    )
    stated = [row[cell] for row in rows for cell in ("int8", "kv4")]
    stated = [cell for cell in stated if cell["outcome"] == "stated" and cell["ratio"] is not None]
    wrong = sum(not 1 / TWICE <= cell["ratio"] <= TWICE and not cell["warned"] for cell in stated)
    lines.append(
        f"| int8 and kv4 budgets off by more than a factor of {TWICE}, without a warning | {wrong} "
        f"of {len(stated)} |"
    )
    clean, planted = seen["clean"], seen["planted"]
    lines.append(
        f"| `check_run`, a clean bf16 port | {clean['explained']} explained by rounding, "
        f"{clean['accused']} accused, {clean['refused']} refused with a sentence"
        f"{_failures(clean)} |"
    )
    lines.append(
        f"| `check_run`, a weight of one layer with its sign flipped | {planted['named']} named "
        f"at that layer, {planted['elsewhere']} at another one, {planted['missed']} missed, "
        f"{planted['refused']} refused with a sentence, {planted['nothing to plant']} without a "
        f"weight that matters{_failures(planted)} |"
    )
    return "\n".join(lines)


CELLS = ("bf16", "int8", "kv4", "clean", "planted")


def _failures(seen: Counter[str]) -> str:
    return f", {seen['crashed']} crashed, {seen['slow']} took more than a minute"


def _budgets(found: Rows) -> str:
    """One line per architecture."""
    lines = ["| architecture | bf16 | int8 | kv4 | clean port | planted bug |"]
    lines.append("|---" * 6 + "|")
    for name, row in sorted(found.items()):
        if "budgets" in row:
            cells = [_cell(cell, row["budgets"][cell]) for cell in CELLS]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(cell: str, found: dict[str, Any]) -> str:
    match found["outcome"]:
        case "stated":
            ratio = "0" if found["ratio"] is None else f"{found['ratio']:.2f}"
            return f"{ratio} (warned)" if found["warned"] else ratio
        case "explained" | "accused":
            return f"{found['outcome']}, {found['ratio']:.2f} of {found['limit']:.2f}"
        case "named" | "elsewhere" | "missed":
            where = f", {found['ratio']:.1f} x" if found["ratio"] else ""
            return f"{found['outcome']}: layer {found['layer']}{where}"
    return str(found["outcome"])


def _reasons(found: Rows) -> str:
    """The sentences of refused budgets and comparisons, and whom they concern."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, row in sorted(found.items()):
        for cell, one in row.get("budgets", {}).items():
            if "reason" in one:
                sentence = one["reason"].replace(row.get("class", name), "MODEL")
                groups[f"{cell} {one['outcome']}: {sentence}".replace("|", "/")].append(f"`{name}`")
    return _groups("why", groups) if groups else "None was refused."


def _groups(head: str, groups: dict[str, list[str]]) -> str:
    rows = [(head, "architectures (`model_type`)"), ("---", "---")]
    for group, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        rows.append((group, f"{len(names)}: {', '.join(names)}"))
    return "\n".join(f"| {left} | {right} |" for left, right in rows)


PAGE = """# Architectures one by one

Every architecture of transformers {version} was built with small random weights and measured at its
first and last layer, at every [scope](scopes.md). This page is generated:
`python -m tests.models.survey --workers N` measures, and the same with `--store` writes the page.

| of the {names} names in transformers' list of architectures, examined | {total} |
|---|---|
| measured | {measured} |
| refused, with a sentence that says why | {refused} |
| crashed, or took more than a minute | {crashed} |
| nothing known: needs another package, or no small sizes that fit together | {not_built} |

## Measured

{table}

## Budgets and comparisons of runs

Every architecture that is measured also gets [error budgets](error_budgets.md) in bf16, int8 and
kv4, each with a real run in that format. Then a clean bf16 port of it is compared with it, and a
port in which one weight matrix of a randomly chosen layer has the wrong sign. A matrix is passed
over if its sign moves the output of its layer by less than three times what bf16 does.

{totals}

bf16, int8, kv4: observed / predicted; warned: the budget says that its error is not linear, mostly
because a token went to another expert, or in bf16 that equal roundings add up, and then it agrees
by construction (qwen4_exp_text, hrm_text, levit). Clean port: the largest ratio of observed and
predicted error at a hidden state, and its limit. Planted bug: the layer that has it, and the error
at the state that is named, over what rounding explains.

{budgets}

### Refused budgets

{reasons}

## Refused

Some of these run with more inputs than token ids, or with sound. In Python, give them all by name,
each with one row per sample: `ls.measure(model, inputs={{"input_features": X}}, scopes=["block"])`.

{refusals}
"""
