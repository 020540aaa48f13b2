"""Keras callbacks: checkpoints and metrics of `model.fit`. The only module that imports Keras."""

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
        "kinetic.keras needs Keras, which is not installed: pip install keras."
    ) from missing


class KerasMetrics(library.callbacks.Callback):  # type: ignore[misc]
    """Callback that records the metrics of `model.fit` with `kinetic.log`.

    A step is a batch, counted by the optimizer: after a restore, the curves go on. The values are
    those of Keras's progress bar: means over the epoch so far.

    Args:
        each_batch: Log every batch, and validation metrics at the end of an epoch. False logs only
            at the end of an epoch.

    Example:
        <!-- not run: Keras takes seconds to import -->
        ```python
        model.fit(x, y, callbacks=[kinetic.keras.Metrics()])
        ```
    """

    async_safe = True

    def __init__(self, *, each_batch: bool = True) -> None:
        super().__init__()
        self._each_batch = each_batch
        self._begin = self._done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the step at which the epoch begins."""
        self._begin, self._done = int(self.model.optimizer.iterations), 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the metrics of a batch."""
        self._done = max(self._done, batch)
        if self._each_batch and logs:
            log(step=self._begin + batch, **logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the metrics that Keras computes once per epoch."""
        batch_metrics = "loss", *self.model.metrics_names
        values = {
            name: value
            for name, value in (logs or {}).items()
            if not (self._each_batch and name in batch_metrics)
        }
        if values:
            log(step=self._begin + self._done, **values)


class KerasCheckpointer(library.callbacks.Callback):  # type: ignore[misc]
    """Callback that saves the state of `model.fit` and resumes it: weights, optimizer and epoch.

    It is a `kinetic.Checkpointer`, which explains tiers and options. A step is a batch or the end
    of an epoch. An interrupted epoch runs again from its beginning, with the weights of its last
    save.

    Args:
        directory: Path or URI of the persistent tier; by default `checkpoints` below
            `KINETIC_OUTPUT_DIR`.
        each_epoch: Save to the persistent tier at the end of every epoch, with its logs as metrics.
        every: Save to the persistent tier every so many batches, or after a length of time ("10m").
        at_least_every: Save to the persistent tier if nothing was saved there for this time; None
            for never.
        local_every: Save to the local tier every so many batches; None for no local tier.
        keep: Number of newest persistent checkpoints to keep; None for all.
        best: Name of a log, such as "val_loss": the best checkpoint by it is kept as well.
        best_is: "min" or "max".
        verify: Save digests and check them on restore.

    Example:
        <!-- not run: Keras takes seconds to import -->
        ```python
        model.fit(x, y, epochs=10, callbacks=[kinetic.keras.Checkpointer()])
        ```
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
        """Restore the newest checkpoint."""
        if self._checkpointer is not None:
            self._checkpointer._give_up(waits=True)  # A previous `fit` has raised.
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
            model._initial_epoch = self._epoch  # `fit` starts at this epoch.

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the state, if a save is due."""
        self._save(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the state, with the epoch's logs as metrics."""
        self._epoch = epoch + 1
        self._save(self._epoch, logs, force=self._each_epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait until everything is committed."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _save(self, epoch: int, logs: dict[str, Any] | None = None, *, force: bool = False) -> None:
        assert self._checkpointer is not None  # Keras calls on_train_begin first
        # Pass a function, so that variables are read only if a save is due: it takes Keras long.
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
