"""Numbers that a restructuring must not change: compare two trees to the last bit on one machine.

    python -m tests.snapshots record FILE      run the commands below, write what they print
    python -m tests.snapshots compare OLD NEW  list the values that differ; exit code 1 if any do

Processors round differently, so that no recorded number is kept in the repository: check the old
tree out beside the new one and record both. Names that changed on purpose are listed in
snapshot_names.toml; `record` writes today's names, `compare` translates those of OLD.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import tempfile
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Flat = dict[str, Any]
NAMES = Path(__file__).with_name("snapshot_names.toml")
TIMES = {"seconds", "wall", "created", "date"}
"""Fields that differ between two runs of the same tree."""

STUDIES = {
    "embedded": "--lengths 8,16 --samples 2 --layers 0,1",
    "scopes": "tiny --text prose.txt --lengths 8,16 --samples 1 --scope residual --scope block "
    "--scope suffix --scope model --gap inf",
    "float32": "tiny --text prose.txt --lengths 8,12 --samples 2 --dtype float32 --workers 2",
}
PRINTED = {
    "budget": "budget tiny --text prose.txt --format bf16,int8,kv8 --observe --length 32 "
    "--samples 2",
    "check": "check tiny tiny --text prose.txt --length 16 --samples 1",
    "bounds": "bounds tiny --text prose.txt --lengths 16",
    "construction": "attack tiny --text prose.txt --kind construction --length 8",
    "ascent": "attack tiny --text prose.txt --kind ascent --length 8",
    "direction": "attack tiny --text prose.txt --kind direction --length 8",
    "tokens": "attack tiny --text prose.txt --kind tokens --length 8 --swaps 1",
    "claims": "reproduce --quick --only S1,S3,S4,S6,S7,S8,S9,S10,N3,K1,K10,V5",
}


def printed(command: str) -> str:
    """What a command prints; its exit code must be 0."""
    from lipscope.cli import main

    out = io.StringIO()
    with redirect_stdout(out):
        code = main(command.split())
    if code:
        raise SystemExit(f"lipscope {command}: exit code {code}")
    return out.getvalue()


def flat(value: Any, name: str) -> Flat:
    """A nested record as name -> value; items of a list are named by what identifies them."""
    if isinstance(value, dict):
        parts = {f"{name}.{k}": v for k, v in value.items() if k not in TIMES}
    elif isinstance(value, list):
        parts = {f"{name}[{i}]": v for i, v in enumerate(value)}
    else:
        return {name: value}
    return {k: v for part, item in parts.items() for k, v in flat(item, part).items()}


def exported(study: str) -> Flat:
    """The rows and the tokens of a study, by what identifies a row."""
    found: Flat = {}
    for kind in ("", " --tokens"):
        for row in csv.DictReader(io.StringIO(printed(f"export {study}{kind}"))):
            own = [row.pop(k) for k in ("scope", "layer", "head", "n", "sample")]
            key = ".".join([study, *own, row.pop("position", "")])
            found |= {f"{key}.{k}": v for k, v in row.items() if k not in TIMES}
    return found


def helped() -> Flat:
    """The options of every command, and the public names."""
    import lipscope

    commands = re.findall(r"^│ ([a-z][a-z-]+) ", printed("--help"), flags=re.M)
    found: Flat = {"names": sorted(lipscope.__all__)}
    for command in commands:
        options = re.findall(r"--[a-z][a-z-]+", printed(f"{command} --help"))
        found[f"help.{command}"] = sorted(set(options))
    return found


def record(target: Path) -> None:
    """Run everything in a new directory and write the values to target."""
    from tests.study.tiny import PROSE, save_tiny

    with tempfile.TemporaryDirectory() as folder:
        # Recorded commands hold paths, which are names of the test and not results.
        home = str(Path(folder).resolve())
        os.chdir(home)
        save_tiny(Path("tiny"), layers=2)
        Path("prose.txt").write_text(PROSE, encoding="utf-8")
        found = helped()
        for name, options in STUDIES.items():
            printed(f"measure {options} --out {name} --quiet --no-report")
            found |= exported(name)
        for name, command in PRINTED.items():
            found |= flat(json.loads(printed(f"{command} --json --quiet")), name)
        os.chdir(target.parent)
    target.write_text(json.dumps(found, indent=0).replace(home + "/", ""), encoding="utf-8")
    print(f"{len(found)} values in {target}")


def translated(old: Flat) -> Flat:
    """The values of an older tree under today's names."""
    table = tomllib.loads(NAMES.read_text(encoding="utf-8"))
    found: Flat = {}
    for key, value in old.items():
        for before, after in table["keys"].items():
            key = re.sub(before, after, key)
        if key == "names" or key.startswith("help."):
            known = {table["words"].get(word, word) for word in value} - {""}
            value = sorted(known | set(table["new"].get(key, ())))
        if key:
            found[key] = value
        # A reason was once a part of the status, and rows had no field `extra`.
        if key.endswith(".status") and isinstance(value, str):
            found[key], _, reason = value.partition(": ")
            found[key.removesuffix("status") + "reason"] = reason
    return found


def compare(old: Flat, new: Flat) -> list[str]:
    """A line for every value that differs, is missing or is new."""
    absent = "(absent)"
    new = {key: value for key, value in new.items() if ".extra" not in key or key in old}
    pairs = {key: (old.get(key, absent), new.get(key, absent)) for key in {**old, **new}}
    return [f"{key}: {a} -> {b}" for key, (a, b) in pairs.items() if a != b]


def main(words: list[str]) -> None:
    if words[:1] == ["record"] and len(words) == 2:
        record(Path(words[1]).resolve())
    elif words[:1] == ["compare"] and len(words) == 3:
        old, new = (json.loads(Path(word).read_text(encoding="utf-8")) for word in words[1:])
        differences = compare(translated(old), new)
        print("\n".join([*differences, f"{len(new)} values, {len(differences)} differ"]))
        raise SystemExit(bool(differences))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
