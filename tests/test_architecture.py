"""The rules a machine can check: imports go down, heavy packages stay home, files stay small."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lipscope"

# Lowest first; packages on one line never import each other.
FLOORS = [
    ("_contents", "_display"),
    ("fused",),
    ("_types",),
    ("_checks", "_files", "_torch_internals"),
    ("_ambient",),
    ("linalg",),
    ("attention",),
    ("theorems",),
    ("mean_field",),
    ("attack", "dynamics", "nn"),
    ("models",),
    ("train",),
    ("study",),
    ("probes",),
    ("report",),
    ("papers",),
    ("cli",),
    ("__main__",),
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

HOMES = {
    ("transformers",): {"models", "train", "papers"},
    ("lightning", "pytorch_lightning"): {"train"},
    ("triton",): {"fused"},
    ("matplotlib",): {"report", "papers"},
    ("ot",): {"mean_field"},
    ("torchode", "torchdiffeq"): {"dynamics"},
    ("dask", "distributed", "dask_jobqueue"): {"study"},
    ("pandas", "pyarrow"): {"study", "probes", "report"},
}
HOME = {package: rooms for packages, rooms in HOMES.items() for package in packages}

# A source file over 700 lines needs an entry here, {"path": "reason"}.
LONG: dict[str, str] = {}

NAMESPACES = {"attack", "dynamics", "mean_field", "nn", "theorems"}
"""Packages that are attributes of lipscope."""

SERVICES = {
    "_ambient.entry_point",
    "_ambient.float32_by_default",
    "_checks.usable_device",
    "_files.claim_folder",
    "_display.with_bar",
}
"""What every public function that runs for minutes needs, also one of papers."""

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt)/\w")


def imports(tree: ast.AST, module: str, function: str = "") -> Iterator[tuple[str, str]]:
    """Every (imported dotted name, function around the import), relative imports resolved."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{source}.{alias.name}", function) for alias in node.names)
        else:
            inner = (
                node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
            )
            yield from imports(node, module, inner)


def privacy_violations(source: str, module: str) -> list[str]:
    """Private modules and names that `source`, the text of a module of papers, imports."""
    return [
        f"{module}: papers uses public names only, not {name}"
        for name, _ in imports(ast.parse(source), module)
        if re.match(r"lipscope\.(.*\.)?_[^_]", name) and name.partition(".")[2] not in SERVICES
    ]


def import_violations(source: str, module: str) -> list[str]:
    """What the imports of `source`, the text of `module` ("lipscope.room.file"), break."""
    room, found = module.split(".")[1], []
    if room not in FLOOR:
        return [f"{module}: the room {room!r} is not on the floor plan"]
    for name, function in imports(ast.parse(source), module):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package != "lipscope":
            if room not in HOME.get(package, {room}):
                found.append(f"{module}: {package} may only be imported in {sorted(HOME[package])}")
        elif target not in FLOOR:
            # Papers is a user of the package: it takes public names from the contents page.
            if not target.startswith("__") and room != "papers":
                found.append(f"{module}: import {name!r} from its room, not from the contents page")
        elif target == "report" and re.match("plot(_|$)|_repr_html_$", function):
            continue  # the one exception: results draw themselves
        elif target != room and FLOOR[target] >= FLOOR[room]:
            found.append(f"{module}: {room} may not import {target}")
    return found


def file_violations(path: str, source: str) -> list[str]:
    """Whether a Python file says in its first line what it is, and is short enough."""
    found, lines = [], len(source.splitlines())
    if source.strip() and ast.get_docstring(ast.parse(source)) is None:
        found.append(f"{path}: no docstring says what this file is")
    if lines > 700 and path not in LONG and not path.startswith("tests/"):
        found.append(f"{path}: {lines} lines, more than 700")
    return found


def loaded_by(statement: str) -> set[str]:
    """The top-level packages a fresh interpreter holds after `statement`."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def require(room: str) -> None:
    if not (PACKAGE / room / "__init__.py").exists():
        pytest.skip(f"lipscope/{room} does not exist yet")


def test_imports_go_down_and_heavy_packages_stay_home():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("lipscope", "__init__"):
            found += import_violations(path.read_text(), ".".join(parts))
    assert not found, "\n".join(found)


def test_papers_uses_public_names_and_is_used_by_the_command_line_only():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts)
        if parts[1] == "papers":
            found += privacy_violations(path.read_text(), module)
        elif parts[1] not in ("papers", "cli", "__init__"):
            # models.repository names a module of papers in a string: the architecture of a file.
            names = [name for name, _ in imports(ast.parse(path.read_text()), module)]
            found += [
                f"{module}: only cli imports papers, not {name}"
                for name in names
                if name.startswith("lipscope.papers")
            ]
    assert not found, "\n".join(found)


def test_the_page_on_extending_shows_the_floors():
    floors = [" , ".join(f) for f in FLOORS[::-1] if not f[0].startswith("_")]
    chain = " -> ".join(f"{{{f}}}" if "," in f else f for f in floors).replace(" ,", ",")
    assert f"`{chain}`" in (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def test_every_file_is_short_and_says_what_it_is():
    folders = ("lipscope", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert Path(__file__).resolve() in paths
    found = []
    for path in paths:
        found += file_violations(path.relative_to(ROOT).as_posix(), path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_programs_import_names_that_exist(folder):
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if not isinstance(node, ast.ImportFrom) or module.split(".")[0] != "lipscope":
                continue
            try:
                home = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("lipscope"):
                    continue  # a package that is not everywhere, such as triton
                missing.append(f"{path.name}: {module}")
                continue
            for name in (alias.name for alias in node.names):
                inside = hasattr(home, "__path__") and importlib.util.find_spec(f"{module}.{name}")
                if not hasattr(home, name) and not inside:
                    missing.append(f"{path.name}: {module}.{name}")
    assert not missing, "\n".join(missing)


def test_importing_lipscope_is_light():
    require(".")
    assert not loaded_by("import lipscope") & {
        "torch",
        "transformers",
        "numpy",
        "pydantic",
        "typer",
    }


@pytest.mark.parametrize("room", ["linalg", "attention", "nn"])
def test_the_lower_rooms_need_torch_alone(room):
    require(room)
    heavy = {"transformers", "pydantic", "typer", "pandas", "triton"}
    assert not loaded_by(f"import lipscope.{room}") & heavy


def test_no_public_name_is_also_a_module_beside_it():
    """Importing a module sets it as an attribute of its package, in place of the name."""
    lipscope = importlib.import_module("lipscope")
    for page in (lipscope, *(getattr(lipscope, name) for name in NAMESPACES)):
        modules = {path.stem for path in Path(page.__path__[0]).iterdir()}
        clashes = modules & set(page.__all__) - NAMESPACES
        assert not clashes, f"{page.__name__}: names that are also modules: {sorted(clashes)}"


def test_contents_pages_list_public_names_and_nothing_else():
    lipscope = importlib.import_module("lipscope")
    assert set(dir(lipscope)) >= NAMESPACES
    for page in (lipscope, *(getattr(lipscope, name) for name in NAMESPACES)):
        assert dir(page) == sorted(page.__all__)
        assert all(getattr(page, name) is not None for name in page.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            page.nothing  # noqa: B018


def test_no_tracked_file_names_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="replace")
            found += [f"{name}: {hit.group()}" for hit in MACHINE_PATH.finditer(text)]
    assert not found, "\n".join(found)
