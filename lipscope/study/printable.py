"""Text from strangers, made safe: for a terminal and for a spreadsheet."""

from __future__ import annotations


def for_terminal(text: str, width: int | None = None) -> str:
    """Control, bidi and other invisible characters become visible escapes: no token drives the terminal."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return shown if width is None or len(shown) <= width else shown[: width - 1] + "…"


def for_spreadsheet(text: str) -> str:
    """Text that a spreadsheet would run as a formula is quoted by a leading apostrophe."""
    return "'" + text if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n") else text
