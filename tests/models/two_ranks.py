"""What tests/models/test_sharded.py looks at: blocks of small models on two processes.

python -m tests.models.two_ranks FILE
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as tf

import lipscope as ls
from lipscope.attention.sharded import shard, unshard

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 12}
HEADS: dict[str, Any] = {**SMALL, "num_hidden_layers": 1, "num_attention_heads": 2}
SCOPES = ("heads", "attention", "normed", "residual", "block", "suffix")


def models() -> dict[str, Any]:
    """Small models: rotary and grouped keys, neither, windows and softcaps, position biases."""
    torch.manual_seed(0)
    mixing = tf.LlamaModel(tf.LlamaConfig(**HEADS))
    # A feed-forward layer that also looks at the mean of all tokens.
    mixing.layers[0].mlp.register_forward_hook(lambda m, args, y: y + y.mean(dim=1, keepdim=True))
    return {
        "Llama": tf.LlamaModel(tf.LlamaConfig(**HEADS, num_key_value_heads=1)),
        "BERT": tf.BertModel(tf.BertConfig(**HEADS)),
        "Gemma 2": tf.Gemma2Model(
            tf.Gemma2Config(**HEADS, num_key_value_heads=1, head_dim=4, sliding_window=3)
        ),
        # Its second layer is given the biases of the first.
        "T5": tf.T5EncoderModel(
            tf.T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
        ).encoder,
        "mixing": mixing,
    }


def run(rank: int, rendezvous: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh, found = dist.group.WORLD, {}
    for name, module in models().items():
        survey = ls.load(module, dtype="float64").survey(torch.arange(14).reshape(2, 7))
        layers = [("", 0), (", second layer", 1)][: len(survey.layers)]
        for (place, layer), scope in product(layers, SCOPES):
            try:
                site = survey.site(scope, layer)
            except ls.UserError:  # the model has no such map, on any number of ranks
                continue
            solver = ls.Solver(seed=0)
            plain: Any = ls.local_lipschitz(site.f, site.X, solver=solver)
            try:
                e: Any = ls.local_lipschitz(site.f, shard(site.X, mesh), solver=solver, mesh=mesh)
            except ls.UserError as error:
                found[name + place, scope] = str(error)
                continue
            fields = ("value", "lower", "upper", "status")
            found[name + place, scope] = {
                "plain": [getattr(plain, field) for field in fields],
                "ranks": [getattr(e, field) for field in fields],
                "right": (plain.right, unshard(e.right, mesh)),
            }
    torch.save(found, f"{file}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (f"{folder}/meet", sys.argv[1]), nprocs=2, start_method="fork")
