"""For Keras, in a job: the callbacks `kinetic.keras.Checkpointer` and `kinetic.keras.Metrics`.

In: a model that is trained with `fit`. Out: checkpoints, curves.
"""

from kinetic._in_job.checkpoint.callback import KerasCheckpointer as Checkpointer
from kinetic._in_job.checkpoint.callback import KerasMetrics as Metrics

__all__ = ["Checkpointer", "Metrics"]
