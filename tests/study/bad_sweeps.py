"""Sweep files that are wrong, each in its own way; as a script, runs them all.

    python -m tests.study.bad_sweeps --cases 200

Each must end with a sentence and exit code 2 (nothing began) or 3 (its study failed), must not
leave a file outside the directory of the sweep, and must not stop the study beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import tempfile
from pathlib import Path

VALUES = (
    '"3"', '""', '"a\\u0000b"', "0.5", "nan", "-1", "true", "[]", "[true]", "[0.0]", '["4"]',
    "[[4]]", "[{}]", "[-1]", "[99999999999999999999]", "99999999999999999999", "1979-05-27",
    "07:32:00", "{}",
)  # fmt: skip

ACCEPTED = {
    ("tol", "0.5"), ("gap", "0.5"), ("special_tokens", "true"),
    # Names on the hub and devices are only known when the model is loaded.
    ("revision", '"3"'), ("revision", '""'),
}  # fmt: skip
"""Settings and values that are not wrong, or matter to models from the hub only."""

SETTINGS = (
    "lengths", "samples", "layers", "heads", "scopes", "tol", "gap", "seed", "special_tokens",
    "dtype", "device", "random_init", "tokenizer", "revision",
)  # fmt: skip

GOOD = '[settings.good]\nlengths = [4]\nsamples = 1\nscopes = ["attention"]\nlayers = [0]\n'

WHOLE = {
    "NUL in models": 'models = ["m\\u0000"]',
    "model out of reach": 'models = ["nothing/.."]',
    "pattern": 'models = ["**m"]',
    "pattern of the whole disk": 'models = ["/**/x"]',
    "root": 'models = ["/"]',
    "empty model": 'models = [""]',
    "models a string": 'models = "m"',
    "models a number": "models = 3",
    "models mixed": 'models = ["m", 3]',
    "long model": f'models = ["{"m" * 5000}"]',
    "NUL in texts": 'models = ["m"]\ntexts = ["a\\u0000"]',
    "texts a number": 'models = ["m"]\ntexts = 3',
    "texts true": 'models = ["m"]\ntexts = [true]',
    "missing text": 'models = ["m"]\ntexts = ["nothing.txt"]',
    "text is a folder": 'models = ["m"]\ntexts = ["m"]',
    "column true": 'models = ["m"]\ntexts = [{file = "a.csv", column = true}]',
    "column a list": 'models = ["m"]\ntexts = [{file = "a.csv", column = ["x"]}]',
    "file a number": 'models = ["m"]\ntexts = [{file = 3, column = "x"}]',
    "out a list": 'models = ["m"]\nout = ["x"]',
    "out true": 'models = ["m"]\nout = true',
    "out NUL": 'models = ["m"]\nout = "a\\u0000"',
    "out a number": 'models = ["m"]\nout = 3',
    "settings a list": 'models = ["m"]\nsettings = [1]',
    "a setting a list": 'models = ["m"]\n[settings]\na = []',
    "unknown key": 'models = ["m"]\nmodel = "m"',
    "syntax": 'models = ["m"',
    "deep": "models = " + "[" * 5000,
    "not UTF-8": "\udcff",
    "too many": f'models = ["m"]\ntexts = {[f"{i}.txt" for i in range(320)]}\n'
    + "".join(f"[settings.a{i}]\n" for i in range(320)),
    "twice": 'models = ["m", "m"]',
    "same name": 'models = ["m", "m--a"]\n[settings.""]\n[settings.a]\n[settings."a--a"]',
}  # fmt: skip

ESCAPES = (
    "/../../../escaped", "../escaped", "/escaped", "a/b", "a\\\\..\\\\b", "a\\u0000b",
    "a\\nb", "\\u001b[31m", "x" * 300, "\\u202e",
)  # fmt: skip


def bad_sweeps() -> dict[str, str]:
    """Wrong files by name, those of every kind mixed, so that the first ones are a fair part."""
    cases = dict(WHOLE)
    for name in ESCAPES:
        cases[f"settings called {name[:20]!r}"] = f'models = ["m"]\n[settings."{name}"]\n'
    for setting in SETTINGS:
        for value in VALUES:
            if (setting, value) not in ACCEPTED:
                cases[f"{setting} = {value}"] = (
                    f'models = ["m"]\n{GOOD}[settings.bad]\n{setting} = {value}\n'
                )
    names = list(cases)
    random.Random(0).shuffle(names)
    return {name: cases[name] for name in names}


def outcome(text: str, model: Path) -> str:
    """Run a sweep file; an empty string if it ended as it should, else what is wrong."""
    from lipscope.cli import main

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "a", "b", "c", "sweeps")
        folder.mkdir(parents=True)
        (folder / "m").symlink_to(model)
        file = folder / "sweep.toml"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                code = main(["sweep", str(file), "--quiet"])
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        left = {path.name for path in folder.iterdir()} - {"m", "sweep.toml", "sweep"}
        outside = [path for path in Path(root).rglob("*") if folder not in (path, *path.parents)]
        outside = [path for path in outside if path not in folder.parents]
        if left or outside:
            return f"left {sorted(left)} {outside}"
        words = said.getvalue().strip()
        if code not in (2, 3) or not words.startswith("lipscope: ") or "Traceback" in words:
            return f"exit code {code}: {words}"
        if "[settings.good]" in text and code == 3 and not (folder / "sweep" / "m--good").is_dir():
            return f"the good study was not made: {words}"
    return ""


def main() -> None:
    """Run the campaign and print what went wrong."""
    from tests.study.tiny import save_tiny

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    cases = list(bad_sweeps().items())[: parser.parse_args().cases]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(save_tiny(Path(folder) / "tiny", layers=2))
        wrong = {name: said for name, text in cases if (said := outcome(text, model))}
    for name, said in wrong.items():
        print(f"{name}: {said}")
    print(f"{len(cases)} sweep files, {len(wrong)} ended as they should not")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
