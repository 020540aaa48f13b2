"""Callbacks of Keras: checkpoints and metrics of `model.fit`.

In: a model that is trained. Out: the same model, optimizer and epoch after a restart; curves. The
only module that imports Keras.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from kinetic._core.duration import Duration
from kinetic._in_job.checkpoint.checkpointer import Checkpointer
from kinetic._in_job.metrics import log
from kinetic.errors import PreflightError

try:
    import keras as library
except ImportError as missing:
    raise PreflightError(
        "kinetic.keras needs Keras, which is not installed here: pip install keras."
    ) from missing


class KerasMetrics(library.callbacks.Callback):  # type: ignore[misc]
    """Logs what `model.fit` reports, as `kinetic.log` does: each batch, and at the end of an epoch
    what is validated.

    A step is a batch, counted by the optimizer: training that goes on from a checkpoint goes on
    with its curves. Numbers are those that Keras's progress bar shows: means of the epoch so far.

    Args:
        each_batch: also log batches; False logs the ends of epochs only.
    """

    async_safe = True

    def __init__(self, *, each_batch: bool = True) -> None:
        super().__init__()
        self._each_batch = each_batch
        self._begin = self._done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note with which step the epoch begins."""
        self._begin, self._done = int(self.model.optimizer.iterations), 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Log a batch."""
        self._done = max(self._done, batch)
        if self._each_batch and logs:
            log(step=self._begin + batch, **logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log what comes once per epoch."""
        of_batches = "loss", *self.model.metrics_names
        values = {
            name: value
            for name, value in (logs or {}).items()
            if not (self._each_batch and name in of_batches)
        }
        if values:
            log(step=self._begin + self._done, **values)


class KerasCheckpointer(library.callbacks.Callback):  # type: ignore[misc]
    """Saves what `model.fit` trains, and goes on where it was: weights, optimizer and epoch.

    As `kinetic.Checkpointer`, which explains the tiers and the options; a step is a batch, or the
    end of an epoch. Every epoch's end is saved to the persistent tier, with the epoch's logs as
    metrics. An epoch that was cut off begins again, with the weights that it had when it was saved
    last.

    Args:
        directory: of the persistent tier; by default `checkpoints` below `KINETIC_OUTPUT_DIR`.
        each_epoch: save to the persistent tier at the end of every epoch.
        every: also save so often there, in batches, or a length of time.
        at_least_every: also save there when nothing was saved for so long; None for never.
        local_every: save so often to the local tier, in batches; None to have none.
        keep: how many of the newest persistent checkpoints stay; None for all.
        best: name of a log, such as "val_loss": the best checkpoint by it stays, too.
        best_is: "min" or "max".
        verify: keep digests of what is saved, and check what is restored.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        each_epoch: bool = True,
        every: int | Duration | None = None,
        at_least_every: Duration | None = "10m",
        local_every: int | None = 10,
        keep: int | None = 3,
        best: str | None = None,
        best_is: Literal["min", "max"] = "min",
        verify: bool = True,
    ) -> None:
        super().__init__()
        self._each_epoch = each_epoch
        self._make_checkpointer: Any = lambda: Checkpointer(
            directory,
            every=every,
            at_least_every=at_least_every,
            local_every=local_every,
            keep=keep,
            best=best,
            best_is=best_is,
            verify=verify,
        )
        self._checkpointer: Checkpointer | None = None
        self._epoch = 0
        self._step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Bring back the newest checkpoint."""
        if self._checkpointer is not None:
            self._checkpointer._give_up(waits=True)  # the fit before this one has raised
        self._checkpointer = self._make_checkpointer().__enter__()
        model = self.model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        state, self._step = self._checkpointer.restore(self._state(epoch=0))
        self._epoch = int(state["epoch"])
        if self._checkpointer.restored is not None:
            for name, variables in self._variables().items():
                for variable, value in zip(variables, state[name], strict=True):
                    variable.assign(value)
            model._initial_epoch = self._epoch  # as BackupAndRestore does: there is no other way

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if it is due."""
        self._save(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save to the persistent tier."""
        self._epoch = epoch + 1
        self._save(self._epoch, logs, force=self._each_epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait until everything is committed."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _save(self, epoch: int, logs: dict[str, Any] | None = None, *, force: bool = False) -> None:
        assert self._checkpointer is not None  # Keras calls on_train_begin first
        # The model is only looked at when a save is due: it costs Keras time.
        step, self._step = self._step, self._step + 1
        self._checkpointer._save(step, lambda: self._state(epoch), metrics=logs, force=force)

    def _state(self, epoch: int) -> dict[str, Any]:
        arrays = {
            name: [variable.value for variable in variables]
            for name, variables in self._variables().items()
        }
        return arrays | {"epoch": epoch}

    def _variables(self) -> dict[str, list[Any]]:
        model = self.model
        return {
            "trainable": list(model.trainable_variables),
            "others": list(model.non_trainable_variables),
            "optimizer": list(model.optimizer.variables),
        }
