"""The monitor in transformers' Trainer and in Lightning: same losses and logs, plus its own."""

import csv
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.train.callbacks import lightning_callback, trainer_callback
from lipscope.train.monitor import SmoothnessMonitor
from lipscope.train.watched_models import watch
from tests.models import zoo


class Reconstruction(nn.Module):
    """A transformers model with a loss, as a Trainer wants it; dropout on."""

    def __init__(self, name):
        super().__init__()
        self.trunk = zoo.make(name)
        for module in self.trunk.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2

    def forward(self, input_ids, attention_mask=None, labels=None):
        y = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"loss": y.square().mean(), "logits": y}


def texts(count=16, n=6):
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        mask = torch.ones(n, dtype=torch.long)
        mask[n - i % 3 :] = 0
        rows.append(
            {"input_ids": torch.randint(3, 50, (n,), generator=generator), "attention_mask": mask}
        )
    return rows


def trained(name, folder, monitor_of=None, **options):
    """A Trainer after its steps, the monitor if there was one, and the loss of every step."""
    torch.manual_seed(0)
    model = Reconstruction(name)
    losses = []

    class Noting(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **unused):
            if "loss" in logs:
                losses.append((state.global_step, logs["loss"], logs["grad_norm"]))

    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "learning_rate": 1e-2,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **options})
    trainer = Trainer(model, arguments, train_dataset=texts(), callbacks=[Noting()])
    monitor = None
    if monitor_of is not None:
        monitor = monitor_of(model.trunk)
        trainer.add_callback(trainer_callback(monitor, trainer))
    trainer.train()
    return trainer, monitor, losses


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module="transformers|accelerate|torch|pytorch_lightning|lightning"
        )
        yield


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("bert", {"gradient_accumulation_steps": 2}),
        ("llama", {"bf16": True}),
        ("gpt2", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ],
    ids=["gpt2", "bert, accumulation", "llama, autocast", "compiled"],
)
def test_trainer_trains_and_logs_as_without(name, options, tmp_path, capsys):
    plain, _, losses = trained(name, tmp_path, **options)
    watched, monitor, losses_too = trained(
        name,
        tmp_path,
        lambda m: SmoothnessMonitor(watch(m), every=2, csv=tmp_path / "sigma.csv"),
        **options,
    )
    assert [step for step, _, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert losses_too == losses
    for p, q in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(p, q)
    own = [line for line in watched.state.log_history if "sigma/attention.0" in line]
    assert [line["step"] for line in own] == [2, 4, 6]
    assert [line["sigma/attention.1"] for line in own] == [
        r.sigma for r in monitor.readings if r.layer[-1] == "1"
    ]
    assert all(r.sigma > 0 and r.status in ("converged", "resolution") for r in monitor.readings)
    with open(tmp_path / "sigma.csv") as file:
        assert len(list(csv.DictReader(file))) == 6


def test_trainer_stops_at_the_alarm(tmp_path, capsys):
    alarms = []
    watched, monitor, losses = trained(
        "gpt2",
        tmp_path,
        lambda m: SmoothnessMonitor(
            watch(m, [0]), every=2, max_sigma=1e-6, stop=True, alarm=alarms.append
        ),
    )
    assert watched.state.global_step == 2 and len(alarms) == 1 and monitor.stopped
    assert [step for step, _, _ in losses] == [1, 2]


def lightning_run(folder, monitored, accumulate=1, **options):
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.attention, self.drop = DotSelfAttention(8, 2), nn.Dropout(0.3)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.losses = []

        def training_step(self, batch, i):
            loss = self.encoder(self.drop(self.attention(batch))).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, i):
            self.losses.append(self.encoder(self.attention(batch)).sum().item())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    net = Net()
    monitor = (
        SmoothnessMonitor(net, every=2, csv=folder / "sigma.csv", **options) if monitored else None
    )
    data = torch.randn(12, 5, 8, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        max_steps=6,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        callbacks=[lightning_callback(monitor)] if monitor else [],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
    )
    trainer.fit(net, DataLoader(data, batch_size=2), DataLoader(data, batch_size=4))
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        return net, trainer, monitor, list(csv.DictReader(file))


@pytest.mark.wide
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_trains_and_logs_as_without(accumulate, tmp_path):
    net, _, _, lines = lightning_run(tmp_path, False, accumulate)
    watched, _, monitor, lines_too = lightning_run(tmp_path, True, accumulate)
    assert watched.losses == net.losses and len(net.losses) > 6
    for p, q in zip(net.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p, q)
    losses = {line["step"]: line["loss"] for line in lines if line["loss"]}
    assert {line["step"]: line["loss"] for line in lines_too if line["loss"]} == losses and len(
        losses
    ) == 6
    own = [line for line in lines_too if line["sigma/attention"]]
    assert [list(losses).index(line["step"]) + 1 for line in own] == [2, 4, 6]
    readings = [r for r in monitor.readings if r.layer == "attention"]
    assert [float(line["sigma/attention"]) for line in own] == pytest.approx(
        [r.sigma for r in readings]
    )
    assert [r.step for r in readings] == [2, 4, 6]


def test_lightning_stops_at_the_alarm(tmp_path):
    alarms = []
    _, trainer, _, _ = lightning_run(tmp_path, True, max_sigma=1e-6, stop=True, alarm=alarms.append)
    assert trainer.global_step == 2 and len(alarms) == 2


def test_lightning_counts_steps_not_optimizers_also_after_a_resume(tmp_path):
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger

    class Pair(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.attention, self.other = DotSelfAttention(8, 2), nn.Linear(8, 8)
            self.automatic_optimization = False

        def training_step(self, batch, i):
            loss = self.other(self.attention(batch)).square().mean()
            self.log("loss", loss)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.attention, self.other)
            ]

    def run(batches, checkpoint):
        net = Pair()
        monitor = SmoothnessMonitor(net, every=2)
        trainer = pl.Trainer(
            max_epochs=2 if checkpoint else 1,
            logger=CSVLogger(tmp_path, flush_logs_every_n_steps=1),
            callbacks=[lightning_callback(monitor)],
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=1,
            default_root_dir=tmp_path,
        )
        trainer.fit(net, DataLoader(torch.randn(batches, 5, 8)), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
            lines = list(csv.DictReader(file))
        at = {
            key: [int(line["step"]) for line in lines if line[key]]
            for key in ("loss", "sigma/attention")
        }
        return trainer.global_step, [reading.step for reading in monitor.readings], at

    assert run(4, None) == (8, [2, 4], {"loss": [0, 1, 2, 3], "sigma/attention": [1, 3]})
    assert run(4, tmp_path / "last.ckpt") == (
        16,
        [6, 8],
        {"loss": [4, 5, 6, 7], "sigma/attention": [5, 7]},
    )
