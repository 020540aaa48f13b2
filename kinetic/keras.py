"""For Keras, in a job: `kinetic.keras.Checkpointer`, a callback.

In: a model that is trained with `fit`. Out: checkpoints.
"""

from kinetic._in_job.checkpoint.callback import KerasCheckpointer as Checkpointer

__all__ = ["Checkpointer"]
