"""All claims of both papers, in the order in which they are run and shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from lipscope import UserError, papers
from lipscope.papers.claims import PAPERS, Claim


def claims() -> list[Claim]:
    """Every claim, ordered by paper, letter and number."""
    found: list[Claim] = []
    for module in iter_modules(papers.__path__):
        # One or several files per paper, named after it; each may have a list CLAIMS.
        if module.name.startswith(("castin", "kim")):
            file = import_module(f"lipscope.papers.{module.name}")
            found += getattr(file, "CLAIMS", [])
    order = list(PAPERS)
    return sorted(found, key=lambda claim: (order.index(claim.paper), *_order(claim.id)))


def _order(name: str) -> tuple[int, int]:
    letter = name[0]
    number = name[1:]
    return "CSVNKA".index(letter), int(number)


def chosen(paper: str | None = None, only: Sequence[str] | None = None) -> list[Claim]:
    """The claims of a paper, or those named; raises UserError for what does not exist."""
    every = claims()
    if paper is not None and paper not in PAPERS:
        raise UserError(f"there is no paper {paper!r}; choose one of {', '.join(PAPERS)}")
    found = [claim for claim in every if paper is None or claim.paper == paper]
    if only is None:
        return found
    known = {claim.id: claim for claim in found}
    names = [name for part in only for name in _named(part, known)]
    for name in names:
        if name not in known:
            raise UserError(
                f"there is no claim {name!r}{f' of {paper}' if paper else ''}; "
                "`lipscope reproduce --list` names them all"
            )
    return [claim for claim in found if claim.id in names]


def _named(part: str, known: dict[str, Claim]) -> list[str]:
    """One id, or a range such as C1-C8."""
    span = re.fullmatch(r"([A-Z])(\d{1,3})-\1(\d{1,3})", part.strip())
    if span is None:
        return [part.strip()]
    letter = span[1]
    first = int(span[2])
    last = int(span[3])
    return [f"{letter}{i}" for i in range(first, last + 1)] or [part.strip()]
