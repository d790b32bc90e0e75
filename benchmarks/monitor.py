"""Cost of a SmoothnessMonitor at every = 50, all layers: twin models train in turn. Target: 3 %.

python benchmarks/monitor.py [WINDOWS]              # of 50 steps each, 5 by default; two minutes

Both twins start from the same weights and read the same batches; every step of one is timed next
to the same step of the other, in processor seconds of this thread, so that other load affects both
alike. There is one ratio per window.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import lipscope as ls

EVERY, BATCH, TOKENS, WIDTH, DEPTH, HEADS = 50, 8, 128, 128, 4, 4


class Character(nn.Module):
    """A pre-norm GPT on lipscope's dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.ModuleList(
            ls.nn.DotSelfAttention(WIDTH, HEADS, causal=True) for _ in range(DEPTH)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(DEPTH)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position.weight
        for norm, attention, mlp in zip(self.norm, self.attention, self.mlp, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return x @ self.embedding.weight.T


def bare() -> nn.Module:
    return Character()


def transformers_gpt2() -> nn.Module:
    sizes = {
        "n_embd": WIDTH,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "n_positions": TOKENS,
        "vocab_size": 256,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


class Twin:
    """A model in training, with a monitor if it is the monitored one."""

    def __init__(self, make: Callable[[], nn.Module], folder: str | None):
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.random, self.losses, self.monitor, self.inside = torch.get_rng_state(), [], None, 0.0
        if folder is not None:
            gpt2 = isinstance(self.model, GPT2LMHeadModel)
            target = ls.watch(self.model) if gpt2 else self.model
            self.monitor = ls.SmoothnessMonitor(
                target, every=EVERY, csv=f"{folder}/sigma.csv", max_sigma=1e6
            )

    def step(self, text: Tensor, number: int) -> float:
        """Processor seconds of one training step."""
        where = torch.randint(
            len(text) - TOKENS - 1, (BATCH,), generator=torch.Generator().manual_seed(number)
        )
        batch = torch.stack([text[i : i + TOKENS + 1] for i in where.tolist()])
        torch.set_rng_state(self.random)
        began = time.process_time()
        output = self.model(batch[:, :-1])
        logits = output if isinstance(output, Tensor) else output.logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        trained = time.process_time()
        if self.monitor is not None:
            self.monitor.step(number)
        seconds = time.process_time() - began
        self.inside += seconds - (trained - began)
        self.random = torch.get_rng_state()
        self.losses.append(loss.item())
        return seconds


def compare(make: Callable[[], nn.Module], text: Tensor, windows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = Twin(make, None), Twin(make, folder)
        ratios, total = [], 0.0
        for window in range(windows):
            times = [0.0, 0.0]
            for number in range(window * EVERY, (window + 1) * EVERY):
                twins = list(enumerate((plain, watched)))
                for i, twin in twins if number % 2 else reversed(twins):
                    times[i] += twin.step(text, number)
            ratios.append(times[1] / times[0])
            total += times[1]
    assert plain.losses == watched.losses, "the watched twin has gone its own way"
    assert watched.monitor is not None
    products = [reading.products for reading in watched.monitor.readings]
    cost = 100 * (statistics.median(ratios) - 1)
    spread = "windows " + " ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios)
    name = make.__name__.replace("_", " ")
    print(f"{name:20} {cost:+.2f} % ({spread})   {'within' if cost < 3 else 'OVER'} 3 %")
    first, last = statistics.mean(products[:DEPTH]), statistics.mean(products[-DEPTH:])
    inside = 100 * watched.inside / (total - watched.inside)
    print(f"{'':20} {inside:.2f} % of the training's time spent inside the monitor")
    print(
        f"{'':20} {first:.0f} products per layer at first, {last:.0f} at the end; "
        "the losses are bit-equal"
    )


def words(kinds: int = 1000, count: int = 20_000) -> Tensor:
    """Bytes of a text of random words with frequencies 1 / rank, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 9, (kinds,), generator=generator)
    vocabulary = [
        torch.randint(ord("a"), ord("z") + 1, (size,), generator=generator)
        for size in sizes.tolist()
    ]
    drawn = torch.multinomial(
        1 / torch.arange(1.0, kinds + 1), count, replacement=True, generator=generator
    )
    space = torch.tensor([ord(" ")])
    return torch.cat([part for i in drawn.tolist() for part in (vocabulary[i], space)])


def main() -> None:
    torch.set_num_threads(1)
    text = words()
    windows = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(
        f"every {EVERY} steps, batch {BATCH} x {TOKENS} tokens, width {WIDTH}, "
        f"{DEPTH} x {HEADS} heads, one thread"
    )
    for make in (bare, transformers_gpt2):
        compare(make, text, windows)


if __name__ == "__main__":
    main()
