"""Error budgets against the truth: trained models, predicted and observed, as JSON and text.

    python -m benchmarks.error_budgets --out DIR --sections train,runs,formats --device cuda

trains a small Llama, Qwen3, GPT-2 and two character models on bytes of a text (seeded; weights stay
in DIR) and measures each section for each of them. Finished parts are kept in DIR/results.json and
skipped the next time; --minutes ends a run early, between two parts. Sections: train, runs,
formats, kl, scores, coverage, bugs, clean, cost, long, table. --tiny makes everything small;
--store merges files results.json into benchmarks/results (with --device cpu: those of the CPU) and
writes the tables of docs/error_budgets.md again, and --page writes the tables alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipscope as ls
from benchmarks.budget_scores import compare_scores, spearman
from benchmarks.error_budget_cases import blocks_of, bugs_of, make, model_bugs, rounded
from benchmarks.error_budget_tables import store, write_page
from lipscope.models.embedded import default_text
from lipscope.probes.budget.formats import read_formats
from lipscope.probes.budget.metrics import of_squares, read_metric
from lipscope.probes.budget.sites import (
    collect_products,
    exact_outputs,
    first_order_errors,
    outputs_in,
)
from lipscope.probes.budget.subject import read_subject

MODELS = ("llama", "qwen3", "gpt2", "char_dot", "char_l2", "embedded")
TRAINED = MODELS[:-1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCORED = (("output", "int8,fp8,int4:32"), ("output", "kv4"), ("kl", "int8,int6:32"))


class Bench:
    """Sizes, the text, the models, and results that survive an interruption."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out, self.device, self.tiny = Path(options.out), options.device, options.tiny
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + 60 * options.minutes
        self.names = options.models.split(",") if options.models else list(MODELS)
        self.context = 128 if self.tiny else 2048
        self.steps = options.steps or (20 if self.tiny else 600)
        text = Path(options.text).read_text() if options.text else default_text()
        self.bytes = torch.tensor(list(text.encode()))
        self.results = self._read()

    def part(self, key: str, work: Callable[[], Any]) -> None:
        """Do a part unless its result is there or the time is up."""
        if key in self.results:
            return
        if time.monotonic() > self.deadline:
            print(f"{key}: left for the next run", flush=True)
            return
        start = time.perf_counter()
        self.results[key] = work()
        seconds = time.perf_counter() - start
        draft = self.out / "results.json.draft"
        draft.write_text(json.dumps(self.results, indent=1))
        draft.replace(self.out / "results.json")
        print(f"{key} ({seconds:.1f} s): {json.dumps(self.results[key])[:1500]}", flush=True)

    def model(self, name: str, head: bool = False) -> Any:
        """A trained model on the device; the embedded one is loaded."""
        if name == "embedded":
            return ls.load(None, device=self.device)
        module = make(name, self.context, self.tiny)
        module.load_state_dict(torch.load(self.out / f"{name}.pt", "cpu", weights_only=True))
        module = module.to(self.device).eval()
        if head:
            return module.network if name.startswith("char") else module
        # Loaded once: comparisons would hash and check it again and again.
        return ls.load(module)

    def ids(self, name: str, rows: int, n: int, seed: int = 0) -> Tensor:
        """Windows of the text, in bytes or in tokens of the embedded model."""
        source = self.bytes
        if name == "embedded":
            source = torch.tensor(
                ls.load(None).encode(bytes(self.bytes[:400000].tolist()).decode())
            )
        g = torch.Generator().manual_seed(1000 + seed)
        starts = torch.randint(len(source) - n, (rows,), generator=g)
        return torch.stack([source[s : s + n] for s in starts])

    def pick(self, tiny: Any, cpu: Any, cuda: Any) -> Any:
        """A size for this machine."""
        return tiny if self.tiny else cpu if self.device == "cpu" else cuda

    def lengths(self, name: str) -> tuple[int, ...]:
        lengths = (32, 64) if self.tiny else (64, 256, 512, 1024, 2048)
        return tuple(n for n in lengths if n <= (512 if name == "embedded" else self.context))

    def _read(self) -> dict[str, Any]:
        path = self.out / "results.json"
        return json.loads(path.read_text()) if path.exists() else {}


def train(bench: Bench, name: str) -> dict[str, float]:
    """Train on random windows of the text and keep the weights; the loss is in nats per byte."""
    module = make(name, bench.context, bench.tiny).to(bench.device).train()
    n = min(bench.context, 512 if bench.device == "cpu" else bench.context)
    batch = 4 if bench.tiny else max(1, 16384 // n)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, bench.steps)
    g, text = torch.Generator().manual_seed(1), bench.bytes.to(bench.device)
    losses = []
    for _ in range(bench.steps):
        starts = torch.randint(len(text) - n - 1, (batch,), generator=g)
        window = torch.stack([text[s : s + n + 1] for s in starts])
        logits = module.network(window[:, :-1]) if name.startswith("char") else module(
            window[:, :-1]
        ).logits  # fmt: skip
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    torch.save(module.state_dict(), bench.out / f"{name}.pt")
    return {"first": losses[0], "last": sum(losses[-10:]) / len(losses[-10:])}


def runs(bench: Bench, name: str, format: str, n: int) -> dict[str, Any]:
    """Observed / predicted at every hidden state of a correct run."""
    model, rows = bench.model(name), 2 if n > 512 or bench.device == "cpu" else 4
    port = rounded(model, DTYPES[format])
    found = ls.check_run(model, port, bench.ids(name, rows, n), probes=4, format=format)
    ratios = [round(state.ratio, 3) for state in found.states]
    return {
        "ratios": ratios,
        "limits": [round(state.limit, 3) for state in found.states],
        "last error": found.states[-1].observed,
        "within 0.85 to 1.15": all(0.85 <= r <= 1.15 for r in ratios),
    }


def formats(bench: Bench, name: str, metric: str) -> dict[str, Any]:
    """Predicted and observed error of every format, all sites together."""
    wanted = {
        "output": "bf16,fp16,int8,fp8,int6:32,int4:32,int3:32,w8a8,kv8,kv4",
        "kl": "bf16,int8,int6:32,int4:32,int3:32",
    }[metric]
    n, rows, probes = bench.pick((32, 2, 8), (64, 4, 64), (256, 8, 64))
    budget = ls.error_budget(
        bench.model(name, head=metric == "kl"),
        bench.ids(name, rows, n),
        formats=wanted,
        metric=metric,
        probes=probes,
        observe=True,
    )
    return {
        f: {
            "predicted": budget.total(f),
            "observed": budget.observed[f],
            "observed / predicted": round(budget.observed[f] / budget.total(f).value, 3),
            "second order": round(budget.second_order[f], 3),
        }
        for f in budget.formats
    }


def scores(bench: Bench, name: str, metric: str, wanted: str) -> list[Any]:
    """Rank correlation and scale of every score against one site at a time."""
    n, rows, probes = bench.pick((24, 2, 8), (48, 2, 128), (128, 4, 128))
    table = compare_scores(
        bench.model(name, head=metric == "kl"),
        bench.ids(name, rows, n),
        formats=wanted,
        metric=metric,
        probes=probes,
        sigma=metric == "output" and "kv" not in wanted,
    )
    return [row._asdict() for row in table.rows]


def coverage(bench: Bench, name: str) -> dict[str, Any]:
    """How often the interval of 8 probes contains the exact first-order error."""
    draws, probes, n = (50, 4, 16) if bench.tiny else (1000, 8, 48)
    subject = read_subject(
        bench.model(name), bench.ids(name, 2, n), head=False, length=n, samples=2
    )
    metric, wanted = read_metric("output"), read_formats("int8,int4:32,kv4")
    size = sum(metric.size(y) for y in exact_outputs(subject, metric))
    products = collect_products(subject, wanted, metric, probes * draws, seed=0)
    found = {}
    for f in wanted:
        exact = first_order_errors(subject, f, metric)
        truth = metric.value(sum(float(dy.square().sum()) for dy in exact), size)
        t = products[f.name].t.sum(dim=-1).reshape(draws, probes, -1)
        intervals = [metric.interval(of_squares(part), size) for part in t]
        inside = sum(i.low <= truth <= i.high for i in intervals)
        found[f.name] = {"truth": truth, "inside": inside / draws}
    return found


def bugs(bench: Bench, name: str) -> dict[str, Any]:
    """Every planted bug: where it was found, and how far its effect stood above the noise."""
    model = bench.model(name)
    ids = bench.ids(name, 2, 32 if bench.tiny else 128)
    found = {}
    planted: list[tuple[str, int | None, nn.Module]] = []
    for bug, layer, plant in bugs_of(name, rounded(model, torch.bfloat16)):
        port = rounded(model, torch.bfloat16)
        plant(blocks_of(port)[layer])
        planted.append((bug, layer, port))
    for bug, plant in model_bugs(name):
        port = rounded(model, torch.bfloat16)
        plant(port)
        planted.append((bug, None, port))
    for bug, layer, port in planted:
        result = ls.check_run(model, port, ids, probes=4, format="bf16")
        state = result.states[0 if layer is None else layer + 1]
        bad = result.first_outside
        found[bug] = {
            "layer": layer,
            "named": None if bad is None else bad.name,
            "ratio there": round(state.ratio, 2),
            "limit": round(state.limit, 2),
        }
    return found


def clean(bench: Bench, name: str, chunk: int, count: int) -> dict[str, Any]:
    """Correct runs of many texts, lengths, batch sizes, dtypes and attention implementations."""
    model, alarms, worst = bench.model(name), 0, 0.0
    for i in range(count):
        seed = chunk * count + i
        attention = ("eager", "sdpa")[seed % 2] if not name.startswith("char") else "eager"
        format = ("bf16", "fp16")[seed // 2 % 2]
        n, rows = (16, 24, 48, 96)[seed // 4 % 4], 1 + seed // 16 % 3
        port = rounded(model, DTYPES[format], attention)
        found = ls.check_run(
            model, port, bench.ids(name, rows, n, seed), probes=3, seed=seed, format=format
        )
        alarms += not found.ok
        worst = max(worst, *(state.ratio / state.limit for state in found.states))
    return {"runs": count, "alarms": alarms, "largest ratio / limit": worst}


def cost(bench: Bench, name: str) -> dict[str, Any]:
    """8 probes and six formats against rounding one layer at a time in six formats."""
    wanted = read_formats("int8,int6:32,int4:32,int3:32,fp8,int5:32")
    n, rows = bench.pick((24, 2), (64, 2), (256, 4))
    subject = read_subject(
        bench.model(name), bench.ids(name, rows, n), head=False, length=n, samples=rows
    )
    metric = read_metric("output")
    collect_products(subject, wanted, metric, 2, seed=0)  # compiles and loads what is needed
    sync(bench)
    reset(bench)
    start = time.perf_counter()
    products = collect_products(subject, wanted, metric, 8, seed=0)
    sync(bench)
    probing, memory = time.perf_counter() - start, peak(bench)
    start = time.perf_counter()
    exact = exact_outputs(subject, metric)
    truth: dict[str, list[float]] = {}
    for f in wanted:
        for site in products[f.name].sites:
            outputs = outputs_in(subject, f, metric, only=site)
            pairs = zip(exact, outputs, strict=True)
            truth.setdefault(f.name, []).append(sum(metric.squared(y, z) for y, z in pairs))
    sync(bench)
    alone = time.perf_counter() - start
    reset(bench)
    step(subject.module, subject.sequences[0])
    return {
        "probing s": probing,
        "one at a time s": alone,
        "ratio": alone / probing,
        "rank": {
            f.name: spearman(products[f.name].t.square().mean(dim=(0, 1)).tolist(), truth[f.name])
            for f in wanted
        },
        "peak bytes": memory,
        "peak bytes of a training step": peak(bench),
    }


def step(module: nn.Module, ids: Tensor) -> None:
    """A training step of one sequence, in the same dtype."""
    module = copy.deepcopy(module).requires_grad_(True)
    optimiser = torch.optim.AdamW(module.parameters())
    module(ids)[0].square().mean().backward()
    optimiser.step()


def long(bench: Bench, n: int) -> dict[str, Any]:
    """Budgets of the keys and values of every head at n tokens, memory linear in n."""
    from transformers import LlamaConfig, LlamaModel

    heads, width = (4, 32) if bench.tiny else (12, 768)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=2 if bench.tiny else 4,
        num_attention_heads=heads, intermediate_size=3 * width, max_position_embeddings=n,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = ls.load(LlamaModel(config).to(bench.device), dtype="float32")
    repeated = bench.bytes.repeat(1 + n // len(bench.bytes))[:n]
    reset(bench)
    start = time.perf_counter()
    subject = read_subject(model, repeated[None], head=False, length=n, samples=1)
    products = collect_products(
        subject, read_formats("kv8,kv4"), read_metric("output"), 2 if bench.tiny else 4, seed=0
    )
    sync(bench)
    seconds, memory = time.perf_counter() - start, peak(bench)
    sites = products["kv4"].sites
    return {
        "n": n,
        "seconds": seconds,
        "GiB": None if memory is None else memory / 2**30,
        "bytes per token": None if memory is None else memory / n,
        "heads": len(sites),
        "finite": bool(products["kv4"].t.isfinite().all()),
    }


def sync(bench: Bench) -> None:
    if bench.device != "cpu":
        torch.cuda.synchronize()


def reset(bench: Bench) -> None:
    if bench.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(bench: Bench) -> int | None:
    return None if bench.device == "cpu" else torch.cuda.max_memory_allocated()


def table(bench: Bench) -> None:
    """The results as text."""
    for key, value in bench.results.items():
        print(key)
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            for name, cell in row.items() if isinstance(row, dict) else ():
                print(f"    {name}: {json.dumps(cell)}")


def work(bench: Bench, section: str) -> None:
    """All parts of a section."""
    names = bench.names
    trained = [name for name in names if name in TRAINED]
    ported = [name for name in trained if not name.startswith("char")]
    match section:
        case "train":
            for name in trained:
                bench.part(f"train/{name}", lambda name=name: train(bench, name))
        case "runs":
            for name in names:
                for n in bench.lengths(name):
                    for f in DTYPES:
                        bench.part(
                            f"runs/{name}/{f}/{n}",
                            lambda name=name, f=f, n=n: runs(bench, name, f, n),
                        )
        case "formats":
            for name in names:
                bench.part(f"formats/{name}", lambda name=name: formats(bench, name, "output"))
        case "kl":
            for name in trained:
                bench.part(f"kl/{name}", lambda name=name: formats(bench, name, "kl"))
        case "scores":
            for name in names:
                for metric, wanted in SCORED:
                    if metric == "output" or name in trained:
                        bench.part(
                            f"scores/{name}/{metric}/{wanted}",
                            lambda name=name, m=metric, w=wanted: scores(bench, name, m, w),
                        )
        case "coverage":
            for name in names:
                bench.part(f"coverage/{name}", lambda name=name: coverage(bench, name))
        case "bugs":
            for name in ported:
                bench.part(f"bugs/{name}", lambda name=name: bugs(bench, name))
        case "clean":
            # 200 runs per model, so that the five trained models have 1,000.
            chunks, count = (1, 4) if bench.tiny else (10, 20)
            for chunk in range(chunks):
                for name in names:
                    bench.part(
                        f"clean/{name}/{chunk}",
                        lambda name=name, chunk=chunk: clean(bench, name, chunk, count),
                    )
        case "cost":
            for name in names:
                bench.part(f"cost/{name}", lambda name=name: cost(bench, name))
        case "long":
            for n in (256, 512) if bench.tiny else (32768, 131072):
                bench.part(f"long/{n}", lambda n=n: long(bench, n))
        case "table":
            table(bench)
        case _:
            raise SystemExit(f"there is no section {section!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="directory of weights and results")
    parser.add_argument("--sections", default="train,runs,formats,kl,scores,coverage,bugs,cost")
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--text", help="UTF-8 text to train on and to measure at")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no part after this")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the tables of the page again")
    parser.add_argument("--store", nargs="+", help="merge results.json files into the repository")
    options = parser.parse_args()
    if options.page:
        write_page()
        return
    if options.store:
        store([Path(path) for path in options.store], cpu=options.device == "cpu")
        write_page()
        return
    if options.out is None:
        parser.error("give --out, the directory of weights and results")
    bench = Bench(options)
    for section in options.sections.split(","):
        work(bench, section)


if __name__ == "__main__":
    main()
