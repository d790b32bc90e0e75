"""How far three replaced words can raise sigma: token attacks against random replacements.

One layer, chosen in advance; texts of 32 tokens; every method may replace the same number of them.
There are as many random texts as the gradient-guided search measures. The search runs in float32;
every result is measured again in float64.

    python benchmarks/token_attack.py                          # paragraphs of the embedded prose
    python benchmarks/token_attack.py --text FILE              # a text in each line
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lipscope as ls
from lipscope.attack.tokens import (
    Swapped,
    duplicated_tokens,
    guided_swaps,
    projected_swaps,
    random_swaps,
)
from lipscope.models.embedded import default_text
from lipscope.probes.token_target import layer_sigma
from lipscope.study.reading import content


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    quick, exact = ls.load(dtype="float32"), ls.load()
    prose = default_text().split("\n\n")
    lines = prose if options.text is None else content(options.text).splitlines()
    texts = [
        ids[: options.length] for line in lines if len(ids := quick.encode(line)) >= options.length
    ]
    texts = texts[:: max(1, len(texts) // options.texts)][: options.texts]
    found: dict[str, list[dict]] = defaultdict(list)
    for i, ids in enumerate(track(texts, console=Console(stderr=True), transient=True)):
        before = sigma(exact, ids, options.layer)
        for seed in range(options.seeds):
            for one in attacks(quick, ids, options, seed):
                after = sigma(exact, one.ids, options.layer)
                row = {
                    "text": i,
                    "seed": seed,
                    "before": before,
                    "after": after,
                    "measured": one.measured,
                }
                found[one.method].append(row | {"positions": one.positions})
    show(found, len(texts), options)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def attacks(
    model: ls.Model, ids: list[int], options: argparse.Namespace, seed: int
) -> list[Swapped]:
    """The guided search and random texts with every seed, the other methods with the first."""
    target = layer_sigma(model, options.layer, seed=seed)
    guided = guided_swaps(target, ids, options.swaps, width=options.width, seed=2 * seed)
    found = [
        guided,
        random_swaps(target, ids, options.swaps, tries=guided.measured - 1, seed=2 * seed + 1),
    ]
    if seed == 0:
        found.append(duplicated_tokens(target, ids, options.swaps, width=options.width))
        found.append(projected_swaps(target, ids, options.swaps))
    return found


def sigma(model: ls.Model, ids: list[int] | tuple[int, ...], layer: int) -> float:
    (site,) = model.sites(torch.tensor([list(ids)]), scopes=("attention",), layers=[layer])
    return ls.local_lipschitz(site.f, site.X).value[0].item()


def show(found: dict[str, list[dict]], texts: int, options: argparse.Namespace) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "method",
        "runs",
        "sigma after / before: median [range]",
        "texts measured: median",
    ):
        table.add_column(name)
    for method, rows in found.items():
        factors = [row["after"] / row["before"] for row in rows]
        spread = f"{median(factors):.3f} [{min(factors):.3f}, {max(factors):.3f}]"
        table.add_row(
            method, str(len(rows)), spread, f"{median(row['measured'] for row in rows):.0f}"
        )
    pairs = list(zip(found["gradient"], found["random"], strict=True))
    wins = sum(a["after"] > b["after"] for a, b in pairs)
    gains = [(a["after"] - a["before"]) / max(b["after"] - b["before"], 1e-9) for a, b in pairs]
    Console().print(
        f"layer {options.layer}, {texts} texts of {options.length} tokens, "
        f"{options.swaps} replaced\n"
    )
    Console().print(table)
    Console().print(
        f"\nguided above random: {wins} of {len(pairs)}; "
        f"ratio of their increases: median {median(gains):.2f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="one text per line")
    parser.add_argument("--out", type=Path, help="keep the numbers as JSON")
    for name, default in (
        ("texts", 8),
        ("seeds", 2),
        ("layer", 3),
        ("length", 32),
        ("swaps", 3),
        ("width", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
