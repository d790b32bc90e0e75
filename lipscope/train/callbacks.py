"""Callbacks that run a SmoothnessMonitor in transformers' Trainer and in Lightning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lipscope.train.monitor import SmoothnessMonitor, logged
from lipscope.train.watched_modules import ModuleWatch

if TYPE_CHECKING:
    from pytorch_lightning import Callback
    from transformers import Trainer, TrainerCallback


def trainer_callback(monitor: SmoothnessMonitor, trainer: Trainer) -> TrainerCallback:
    """Return a callback that measures after the steps of a transformers Trainer.

    Readings are added to the trainer's log (its history and every integration it reports to) as
    ``"sigma/<layer>"``, with the trainer's own step numbers. If the monitor was created with
    ``stop=True``, an alarm ends the training. In distributed training only the first process
    measures.

    Args:
        monitor: The monitor to run.
        trainer: The trainer the callback will be added to.

    Returns:
        A ``transformers.TrainerCallback``.

    Example:
        >>> import tempfile
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48,
        ...     num_hidden_layers=2, num_attention_heads=4))
        >>> monitor = ls.SmoothnessMonitor(ls.watch(model), every=50, max_sigma=100.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, report_to=[], use_cpu=True)
        ...     trainer = Trainer(model, args)  # with a dataset, trainer.train() would follow
        ...     trainer.add_callback(ls.trainer_callback(monitor, trainer))
    """
    from transformers import TrainerCallback

    from lipscope.train.watched_models import ModelWatch

    monitor.close()  # no hooks until a step begins

    class Measuring(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            if state.is_world_process_zero:
                if isinstance(monitor.watch, ModuleWatch | ModelWatch):
                    # The trainer compiles and wraps the model after the monitor was created.
                    monitor.watch.called = trainer.model_wrapped
                monitor.before(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            if not state.is_world_process_zero:
                return
            readings = monitor.step(state.global_step)
            if readings:
                # trainer.log clears should_log: without this the step's own losses are not logged.
                due = control.should_log
                trainer.log(_finite(logged(readings)))
                control.should_log = due
            control.should_training_stop |= monitor.stopped

        def on_train_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            monitor.close()

    return Measuring()


def lightning_callback(monitor: SmoothnessMonitor) -> Callback:
    """Return a callback that measures after the steps of a Lightning Trainer.

    Readings are sent to every logger of the trainer as ``"sigma/<layer>"``, under the same step as
    that step's losses. Loggers count steps from 0, so what the monitor calls step 50
    (``trainer.global_step`` after it) is their step 49. If the monitor was created with
    ``stop=True``, an alarm ends the training. In distributed training only the first process
    measures.

    Args:
        monitor: The monitor to run.

    Returns:
        A ``pytorch_lightning.Callback``.

    Example::

        monitor = ls.SmoothnessMonitor(module, layers=["blocks.*"], every=50)
        trainer = Trainer(max_steps=1000, callbacks=[ls.lightning_callback(monitor)])
        trainer.fit(module, loader)
    """
    from pytorch_lightning import Callback

    monitor.close()  # no hooks until a step begins

    class Measuring(Callback):
        def __init__(self) -> None:
            self._steps = 0
            self._seen = 0
            self._resumed = False

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self._steps}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._steps = state_dict["steps"]
            self._resumed = True

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # A checkpoint written without this callback only has the steps of all optimizers.
            self._steps = self._steps if self._resumed else trainer.global_step
            self._seen = trainer.global_step
            self._resumed = False

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.is_global_zero:
                monitor.before(self._steps + 1)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            # Gradient accumulation makes one step of several batches, and several optimizers count
            # one batch more than once: a step is over when global_step has changed.
            if not trainer.is_global_zero or trainer.global_step == self._seen:
                return
            self._steps = self._steps + 1
            self._seen = trainer.global_step
            readings = monitor.step(self._steps)
            for logger in trainer.loggers if readings else ():
                # The step under which Lightning logs the losses; private, tested with 2.6.
                # global_step would not do: it already counts this step, once per optimizer.
                step = trainer.fit_loop.epoch_loop._batches_that_stepped
                logger.log_metrics(_finite(logged(readings)), step=step)
            trainer.should_stop |= monitor.stopped

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.close()

    return Measuring()


def _finite(values: dict[str, float]) -> dict[str, float]:
    """The values that trackers can plot; the CSV has all of them."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
