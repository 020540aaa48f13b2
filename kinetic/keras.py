"""Callbacks for Keras in a job: `kinetic.keras.Checkpointer` and `kinetic.keras.Metrics`."""

from kinetic._in_job.checkpoint.callback import KerasCheckpointer as Checkpointer
from kinetic._in_job.checkpoint.callback import KerasMetrics as Metrics

__all__ = ["Checkpointer", "Metrics"]
