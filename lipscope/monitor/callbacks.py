"""A SmoothnessMonitor for transformers' Trainer and for Lightning: it measures after their steps, into their logs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lipscope.monitor.modules import ModuleWatch
from lipscope.monitor.monitor import SmoothnessMonitor, logged

if TYPE_CHECKING:
    from pytorch_lightning import Callback
    from transformers import Trainer, TrainerCallback


def trainer_callback(monitor: SmoothnessMonitor, trainer: Trainer) -> TrainerCallback:
    """For transformers: trainer.add_callback(trainer_callback(monitor, trainer)).

    Readings go to the trainer's log (its history, and whatever it reports to) as "sigma/<layer>", at its own step
    numbers; `stop=True` ends the training at an alarm. In distributed training the first process measures.
    """
    from transformers import TrainerCallback

    from lipscope.monitor.models import ModelWatch

    monitor.close()  # until a step begins

    class Measuring(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            if state.is_world_process_zero:
                if isinstance(monitor.watch, ModuleWatch | ModelWatch):
                    monitor.watch.called = trainer.model_wrapped  # which may be compiled by now
                monitor.before(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            if not state.is_world_process_zero:
                return
            readings = monitor.step(state.global_step)
            if readings:
                # To log is to have logged: the trainer would leave out the line it had in mind for this step.
                due = control.should_log
                trainer.log(_finite(logged(readings)))
                control.should_log = due
            control.should_training_stop |= monitor.stopped

        def on_train_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            monitor.close()

    return Measuring()


def lightning_callback(monitor: SmoothnessMonitor) -> Callback:
    """For Lightning: Trainer(callbacks=[lightning_callback(monitor)]).

    Readings go to every logger of the trainer as "sigma/<layer>", in the line of the same step's losses: loggers count
    steps from 0 there, so what the monitor calls step 50 (trainer.global_step after it) is their 49. `stop=True` ends
    the training at an alarm. In distributed training the first process measures.
    """
    from pytorch_lightning import Callback

    monitor.close()  # until a step begins

    class Measuring(Callback):
        def __init__(self) -> None:
            self._steps, self._seen, self._resumed = 0, 0, False

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self._steps}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._steps, self._resumed = state_dict["steps"], True

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # A checkpoint of a training without this callback tells no more than the steps of all optimizers.
            self._steps = self._steps if self._resumed else trainer.global_step
            self._seen, self._resumed = trainer.global_step, False

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.is_global_zero:
                monitor.before(self._steps + 1)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            # Several batches may make one step, and several optimizers count one batch more than once.
            if not trainer.is_global_zero or trainer.global_step == self._seen:
                return
            self._steps, self._seen = self._steps + 1, trainer.global_step
            readings = monitor.step(self._steps)
            for logger in trainer.loggers if readings else ():
                # global_step counts this step already, and every optimizer of it; the losses go by this number.
                logger.log_metrics(
                    _finite(logged(readings)),
                    step=trainer.fit_loop.epoch_loop._batches_that_stepped,
                )
            trainer.should_stop |= monitor.stopped

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.close()

    return Measuring()


def _finite(values: dict[str, float]) -> dict[str, float]:
    """What trackers can draw; the CSV has the rest."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
