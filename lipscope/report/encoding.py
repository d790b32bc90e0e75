"""JSON for a script element: short numbers, and no character that could end the element."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DIGITS = 6
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def as_json(value: Any) -> str:
    """JSON in ASCII: floats to six digits, NaN as null, infinity as 1e999, which parses as such."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return json.dumps(value).translate(_ESCAPES)
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(f"{as_json(str(key))}:{as_json(inner)}" for key, inner in value.items())
            + "}"
        )
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_encoder(value), value)) + "]"
    return json.dumps(value)


def _encoder(values: Sequence[Any]) -> Callable[[Any], str]:
    """A faster encoder for a column of a single type."""
    kinds = {type(value) for value in values}
    return number if kinds == {float} else str if kinds == {int} else as_json


def number(value: float) -> str:
    if math.isnan(value):
        return "null"
    # JSON has no infinity, but JSON.parse reads 1e999 as one.
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return f"{value:.{DIGITS}g}"
