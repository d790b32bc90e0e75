"""Long inputs inside a transformers model on one GPU: seconds and memory of each scope of a layer.

    python -m benchmarks.gpu_model                      # 8192, 32768 and 131072 tokens

The model is a Llama of four layers with random weights: RoPE, 12 heads of size 64, 4 KV heads.
Its causal mask alone would take n^2 bytes.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaModel

import lipscope as ls
from benchmarks.gpu_kernels import Row, show

LAYER, TOL = 2, 1e-2
WARM = 16384
"""Length of a first round, whose time is spent on compilation."""


def model(positions: int) -> ls.Model:
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=positions,
    )
    torch.manual_seed(0)
    return ls.load(LlamaModel(config).cuda(), dtype="float32")


def rows(lengths: list[int]) -> list[Row]:
    """From token ids to sigma, including checks and forward pass; memory beyond the weights."""
    found = []
    for n in [WARM, *lengths]:
        network = model(max(WARM, *lengths))
        ids = torch.randint(1000, (1, n), generator=torch.Generator().manual_seed(n))
        for scope in ("attention", "block"):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            (site,) = network.sites(ids, scopes=[scope], layers=[LAYER])
            e = ls.local_lipschitz(site.f, site.X, tol=TOL, solver=ls.Solver(seed=0))
            torch.cuda.synchronize()
            elapsed, held = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
            residual = float(e.residual)
            print(
                f"{scope}: sigma {e[0].value:.6f} in {e[0].steps} steps, {e[0].status.value}",
                flush=True,
            )
            name = f"model_{scope}"
            found.append(
                show(
                    Row(
                        name=name,
                        n=n,
                        causal=True,
                        dtype="float32",
                        value=elapsed,
                        unit="s",
                        residual=residual,
                    )
                )
            )
            found.append(
                show(
                    Row(
                        name=name,
                        n=n,
                        causal=True,
                        dtype="float32",
                        value=held / n / 1024,
                        unit="KiB per token",
                        residual=residual,
                    )
                )
            )
            del site, e
    return found[4:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[8192, 32768, 131072])
    rows(parser.parse_args().n)


if __name__ == "__main__":
    main()
