"""Pages that MkDocs makes when it builds the site: notebooks, references and files of the root.

They are made from the files that people edit (`examples/notebooks`, `docs/references.bib`,
`CHANGELOG.md`, ...), so nothing is written twice. mkdocs.yml names this file under `hooks`.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
ENTRY = re.compile(r"^@\w+\{(?P<key>\w+),\n(?P<fields>.*?)^\}", flags=re.DOTALL | re.MULTILINE)
FIELD = re.compile(r"^\s*(\w+)\s*=\s*\{(.*)\},?$", flags=re.MULTILINE)
ACCENTS = {r"{\'e}": "é", r"{\'n}": "ń", r"{\'z}": "ź", r"$\ell^p$": "ℓᵖ"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those found in docs/."""
    for notebook in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        page, images = notebook_page(json.loads(notebook.read_text()), notebook.stem)
        made: dict[str, str | bytes] = {f"{notebook.stem}.md": page, **images}
        made[notebook.name] = notebook.read_text()
        for name, content in made.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for page_name, source in ROOT_PAGES.items():
        files.append(File.generated(config, page_name, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "references.md", content=references_page(references())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn citations such as [kim2021] into links to the references."""
    return linked_citations(markdown, "../" * page.file.src_uri.count("/") + "references.md")


def notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, with the outputs stored in it, and its images by file name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.append(_output(output, images, name))
    # After the title, so that the page keeps it as its heading.
    title, *rest = parts
    return "\n\n".join([title, f"[Download this notebook]({name}.ipynb)", *rest]) + "\n", images


def _output(output: dict[str, Any], images: dict[str, bytes], name: str) -> str:
    """One output: an image where there is one, else HTML, else text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        file = f"{name}_{len(images)}.png"
        images[file] = base64.b64decode("".join(data["image/png"]))
        return f"![figure made by the cell above]({file})"
    if "text/html" in data:
        return f'<div class="output" tabindex="0" markdown="0">{"".join(data["text/html"])}</div>'
    return f"``` {{ .text .output }}\n{''.join(data['text/plain']).rstrip()}\n```"


def references() -> dict[str, dict[str, str]]:
    """The entries of references.bib by key, accents as characters."""
    text = (ROOT / "docs" / "references.bib").read_text()
    for latex, character in ACCENTS.items():
        text = text.replace(latex, character)
    return {
        entry["key"]: {name: re.sub("[{}]", "", x) for name, x in FIELD.findall(entry["fields"])}
        for entry in ENTRY.finditer(text)
    }


def references_page(entries: dict[str, dict[str, str]]) -> str:
    """The page of references, one anchor per key."""
    lines = ["# References", "", "In BibTeX: [references.bib](references.bib)."]
    for key, entry in sorted(entries.items()):
        names = [" ".join(reversed(name.split(", "))) for name in entry["author"].split(" and ")]
        authors = ", ".join(names).replace(", others", " et al")
        where = entry.get("booktitle") or entry.get("journal")
        parts = [f"{authors}. *{entry['title']}*", f"{where}, {entry['year']}" if where else ""]
        if "eprint" in entry:
            parts.append(f"[arXiv:{entry['eprint']}](https://arxiv.org/abs/{entry['eprint']})")
        parts.append(entry.get("note", ""))
        text = ". ".join(part for part in parts if part)
        lines += ["", f'<a id="{key}"></a>', "", f"### {label(entry)}", "", f"{text}."]
    return "\n".join(lines) + "\n"


def label(entry: dict[str, str]) -> str:
    """An entry as it is cited in a sentence: Castin et al., 2024."""
    names = [author.split(",")[0] for author in entry["author"].split(" and ")]
    many = len(names) > 2 or names[-1] == "others"
    short = f"{names[0]} et al." if many else " and ".join(names)
    return f"{short}, {entry['year']}"


def linked_citations(markdown: str, target: str) -> str:
    """The text with every [key] or [key, key] as links; [text](address) stays as it is."""
    entries = references()
    one = rf"(?:{'|'.join(entries)})"

    def link(match: re.Match[str]) -> str:
        keys = match[1].split(", ")
        links = "; ".join(f"[{label(entries[key])}]({target}#{key})" for key in keys)
        return rf"\[{links}\]"

    return re.sub(rf"\[({one}(?:, {one})*)\](?!\()", link, markdown)
