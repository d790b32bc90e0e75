"""Whether what a study stores makes sense: one check for every kind of row and record.

A checksum is against accidents: a stranger can compute one for anything. So every row and record
has to pass here too, when it is written and whenever it is read; one that does not counts as lost.
The ranges bound the work of a reader by the size of the file.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lipscope.study.jobs import Command
from lipscope.study.records import BUDGET, FAILING, WORST_CASE, Description, Fingerprint, well_typed

INFO = "info"
TOKENS = "tokens"
NORMS = "token norms"
CLAIM = "claim"
"""Kinds of records: facts about the study, the tokens of a sample, the token norms of a row, and
what a claim of `lipscope reproduce` measured."""

IDENTITY = "identity"
ABOUT = "about"
COMMANDS = "commands"
"""Keys of facts."""

MOST_NAME = 1_000
MOST_TEXT = 100_000
"""Characters of a name, and of a status, a token or a command line."""

MOST_PLACES = 100_000
MOST_TOKENS = 2**31
MOST_SAMPLES = 2**53
"""Layers and heads of a model, tokens of a sample, samples of a length."""

MOST_COMMANDS = 1_000
MOST_JOBS = 1_000_000
"""Commands of a study, and jobs that they ask for together."""


def valid_row(record: tuple[Any, ...]) -> bool:
    """Whether a row, as it is stored, has the right types and ranges and no contradiction."""
    try:
        probe, scope, layer, head, n, sample, kind, norm, *rest = record
        value, lower, upper, residual, status, radius, dtype, device, seconds, *last = rest
        reason, extra = last
        if not (_is_text(extra, MOST_TEXT) and _is_extra(json.loads(extra))):
            return False
    except (ValueError, RecursionError):  # too few fields, no JSON, deep nesting
        return False
    return (
        all(_is_text(x, MOST_NAME) for x in (probe, scope, kind, norm, dtype, device))
        and _is_text(status, MOST_NAME)
        and _is_text(reason, MOST_TEXT)
        and _is_whole(layer, -1, MOST_PLACES)
        and _is_whole(head, -1, MOST_PLACES)
        and _is_whole(n, 1, MOST_TOKENS)
        and _is_whole(sample, 0, MOST_SAMPLES)
        and all(x is None or type(x) is float for x in (value, residual, radius, seconds))
        and type(lower) is type(upper) is float
        and not (math.isnan(lower) or math.isnan(upper))
        # NaN is stored as NULL.
        and (status in FAILING if value is None else lower <= value <= upper)
        and all(x is None or x >= 0 for x in (radius, seconds))
    )


def valid_record(record: tuple[Any, ...]) -> bool:
    """Whether a record (kind, key, value) is what its kind promises; unknown kinds are."""
    try:
        kind, key, value = record
        if not _is_text(kind, MOST_NAME) or not _is_text(key, MOST_TEXT):
            return False
        if not isinstance(value, str | bytes):
            return False
        check = _FACTS.get(key) if kind == INFO else _KINDS.get(kind)
        return check is None or check(key, value)
    # What JSON and the checks below say to nonsense: no JSON, deep nesting, huge integers.
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return False


def parsed_commands(value: Any) -> list[Command]:
    """The commands of a record that passed `valid_record`, or of none."""
    return [Command.from_json(one) for one in json.loads(value)] if value else []


def _identity(key: str, value: str | bytes) -> bool:
    facts = json.loads(value)
    return (
        well_typed(Fingerprint, facts)
        and _texts(facts, MOST_NAME)
        and facts.get("tol", 0) >= 0
        and (facts.get("gap") is None or facts["gap"] >= 0)
        and _is_whole(facts.get("seed", 0), -(2**63), 2**64)
        and _is_whole(facts.get("numeric_version", 0), 0, 2**31)
    )


def _about(key: str, value: str | bytes) -> bool:
    facts = json.loads(value)
    counts = {"layers": MOST_PLACES, "heads": MOST_PLACES, "text_tokens": MOST_SAMPLES}
    tables = [facts.get(name, {}) for name in ("scopes", "versions")]
    return (
        well_typed(Description, facts)
        and _texts(facts, MOST_TEXT)
        and all(_is_whole(facts.get(name, 0), 0, most) for name, most in counts.items())
        and 0 <= facts.get("confidence", 0) <= 1
        and abs(facts.get("difference_to_eager", 0)) <= math.inf
        and _is_whole(facts.get("random_init") or 0, -(2**63), 2**64)
        and all(len(table) <= MOST_NAME for table in tables)
        and all(_is_text(x, MOST_TEXT) for table in tables for pair in table.items() for x in pair)
    )


def _texts(facts: dict[str, Any], most: int) -> bool:
    return all(len(x) <= most for x in facts.values() if isinstance(x, str))


@lru_cache(maxsize=2)  # a command reads this record several times, and it may be long
def _commands(key: str, value: str | bytes) -> bool:
    listed = json.loads(value)
    if not isinstance(listed, list) or len(listed) > MOST_COMMANDS:
        return False
    jobs = 0
    for one in listed:
        command = Command.from_json(one)
        asked = command.asked
        places = [*asked.layers, *asked.heads]
        heads = asked.heads.values()
        if not (
            _is_text(command.verb, MOST_NAME)
            and _is_text(command.line, MOST_TEXT)
            and _is_text(command.probe_prefix, MOST_TEXT)
            and all(_is_text(scope, MOST_NAME) for scope in asked.scopes)
            and all(_is_whole(x, 0, MOST_PLACES) for x in places)
            and all(_is_whole(head, 0, MOST_PLACES) for some in heads for head in some)
            and all(_is_whole(n, 1, MOST_TOKENS) for n, _ in asked.groups)
            and all(samples for _, samples in asked.groups)
            and all(_is_whole(s, 0, MOST_SAMPLES) for _, some in asked.groups for s in some)
            and all(
                len(set(some)) == len(some)
                for some in (asked.layers, asked.scopes, *heads, *(s for _, s in asked.groups))
            )
            and set(asked.layers) <= set(asked.heads)
        ):
            return False
        jobs += len(asked.groups) * (len(asked.layers) + 1)
    return jobs <= MOST_JOBS


def _tokens(key: str, value: str | bytes) -> bool:
    n, sample = json.loads(key)
    tokens = json.loads(value)
    return (
        _is_whole(n, 1, MOST_TOKENS)
        and _is_whole(sample, 0, MOST_SAMPLES)
        and type(tokens) is list
        and len(tokens) == n
        and all(_is_text(token, MOST_TEXT) for token in tokens)
    )


def _norms(key: str, value: str | bytes) -> bool:
    scope, layer, head, n, sample = json.loads(key)
    if not (
        _is_text(scope, MOST_NAME)
        and all(x is None or _is_whole(x, 0, MOST_PLACES) for x in (layer, head))
        and _is_whole(n, 1, MOST_TOKENS)
        and _is_whole(sample, 0, MOST_SAMPLES)
        and isinstance(value, bytes)
        and len(value) == 8 * n
    ):
        return False
    norms = array("f", value)
    # The sum is NaN if one of them is. Each list has norm 1, up to rounding.
    return min(norms) >= 0 and max(norms) <= 1.01 and math.isfinite(sum(norms))


def _budget(key: str, value: str | bytes) -> bool:
    metric, probes, embeddings, observe, seed, b, n, format = json.loads(key)
    part = json.loads(value)
    sites = part["sites"]
    products = part["q"]
    return (
        _is_text(metric, MOST_NAME)
        and _is_text(format, MOST_NAME)
        and type(embeddings) is type(observe) is type(part["summed"]) is bool
        and _is_whole(probes, 0, MOST_JOBS)
        and _is_whole(seed, -(2**63), 2**64)
        and _is_whole(b, 0, MOST_SAMPLES)
        and _is_whole(n, 1, MOST_TOKENS)
        and part["n"] == n
        and all(_is_site(*site) for site in sites)
        # One row per probe, one column per site.
        and len(products) == (probes if sites else 0)
        and all(len(row) == len(sites) and all(map(_is_number, row)) for row in products)
        and _is_square(part["size"])
        and (part["observed"] is None or _is_square(part["observed"]))
        and (part["curved"] is None or [_is_square(x) for x in part["curved"]] == [True, True])
    )


def _is_extra(extra: Any) -> bool:
    """Whether the extra of a row is an object, and what lipscope writes there has its type."""
    if type(extra) is not dict:
        return False
    refused = extra.get("not_offered", {})
    return (
        isinstance(extra.get("settings"), dict | None)
        and all(_is_text(extra.get(name, ""), MOST_TEXT) for name in ("detail", "format"))
        and _is_whole(extra.get("order", 0), 0, MOST_JOBS)
        and isinstance(refused, dict)
        and all(_is_text(why, MOST_TEXT) for why in refused.values())
    )


def _is_site(name: Any, layer: Any, kind: Any, head: Any) -> bool:
    return (
        _is_text(name, MOST_NAME)
        and _is_text(kind, MOST_NAME)
        and all(x is None or _is_whole(x, 0, MOST_PLACES) for x in (layer, head))
    )


def _worst_case(key: str, value: str | bytes) -> bool:
    metric, format = json.loads(key)
    names = _is_text(metric, MOST_NAME) and _is_text(format, MOST_NAME)
    return names and _is_number(json.loads(value))


def _claim(key: str, value: str | bytes) -> bool:
    record = json.loads(value)
    texts = [record.pop(name) for name in ("id", "device", "code", "version")]
    used = record.pop("used")
    numbers = record.pop("numbers")
    return (
        all(_is_text(text, MOST_NAME) for text in texts)
        and type(record.pop("quick")) is bool
        and _is_whole(record.pop("seed"), -(2**63), 2**64)
        and _is_number(record.pop("seconds"))
        and all(_is_text(x, MOST_NAME) for pair in used.items() for x in pair)
        and isinstance(numbers, dict)
        and not record
    )


_FACTS: dict[str, Callable[[str, str | bytes], bool]] = {
    IDENTITY: _identity,
    ABOUT: _about,
    COMMANDS: _commands,
}
_KINDS: dict[str, Callable[[str, str | bytes], bool]] = {
    TOKENS: _tokens,
    NORMS: _norms,
    BUDGET: _budget,
    WORST_CASE: _worst_case,
    CLAIM: _claim,
}


def _is_text(x: Any, most: int) -> bool:
    return isinstance(x, str) and len(x) <= most


def _is_whole(x: Any, least: int, most: int) -> bool:
    return type(x) is int and least <= x <= most


def _is_square(x: Any) -> bool:
    return _is_number(x) and not x < 0  # NaN where a run overflows


def _is_number(x: Any) -> bool:
    return type(x) is float or _is_whole(x, -(2**63), 2**63)
