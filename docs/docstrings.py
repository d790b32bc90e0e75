"""Docstrings as MkDocs renders them: examples as code, names as links.

A griffe extension, named in mkdocs.yml under the options of mkdocstrings. Griffe knows the section
"Examples:" only, while these docstrings say "Example:", as PyTorch's do.
"""

import re
from typing import Any

import griffe

import lipscope

ROLE = re.compile(r":\w+:`~?([\w.]+)`")
PAGE = re.compile(r"(?<!`)docs/([\w/]+)\.md")
HEADING = re.compile(r"^Example:$", flags=re.MULTILINE)


class HouseStyle(griffe.Extension):
    """Rewrite docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object with the docstring as it is in the source."""
        if obj.docstring is not None:
            obj.docstring.value = rendered(obj.docstring.value)


def rendered(docstring: str) -> str:
    """The docstring with the section that griffe knows, and the roles of Sphinx as links."""

    def link(role: re.Match[str]) -> str:
        name = role[1].removeprefix("lipscope.")
        return f"[`{name}`][lipscope.{name}]" if name in lipscope.__all__ else f"`{name}`"

    return PAGE.sub(r"[\1](../\1.md)", ROLE.sub(link, HEADING.sub("Examples:", docstring)))
