"""`kinetic.keras.Checkpointer`: `model.fit` that was killed goes on as if nothing had happened.

In: trainings with Keras on one and on two hosts. Out: losses, equal to the last bit.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

import kinetic

pytestmark = pytest.mark.timeout(600)


def fit(epochs, folder, die_in=None, **options):
    """Train, and return the epochs that were done and their losses."""
    sys.modules.update(sklearn=None, matplotlib=None)  # Keras would import them, for a second each
    import jax
    import keras
    import numpy as np

    class Death(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (self.model.optimizer.iterations.value, jax.process_index()) == (die_in, last):
                os.kill(os.getpid(), signal.SIGKILL)

    jax.config.update("jax_disable_most_optimizations", True)  # they take longer than the training
    keras.utils.clear_session()  # the second model of a job has the names of the first
    attempt, last = int(os.environ["KINETIC_ATTEMPT"]), jax.process_count() - 1
    if jax.process_count() > 1:
        mesh = keras.distribution.DeviceMesh((jax.device_count(),), ["batch"], jax.devices())
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)
        )
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    layers = [keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer="adam", loss="mse")
    saving = kinetic.keras.Checkpointer(folder, **options)
    dying = [Death()] if die_in and attempt == 1 else []
    history = model.fit(
        x,
        x.sum(axis=1),
        epochs=epochs,
        batch_size=16,
        shuffle=False,
        verbose=0,
        callbacks=[saving, *dying],
    )
    return history.epoch, history.history.get("loss", [])


def fits(*trainings):
    """Several trainings one after the other, so that Keras is imported once for all of them."""
    return [fit(**training) for training in trainings]


def test_epochs_go_on_in_another_job(tmp_path):
    train = kinetic.run("cpu")(fits)
    run = {"folder": str(tmp_path / "run"), "best": "loss"}
    two = {"epochs": 2} | run
    four = {"epochs": 4} | run
    begun, (epochs, whole) = train(two, {"epochs": 4, "folder": str(tmp_path / "whole")})
    assert epochs == [0, 1, 2, 3]
    assert begun == ([0, 1], whole[:2])
    assert train(four, four) == [([2, 3], whole[2:]), ([], [])]


def test_a_host_is_killed_in_the_third_epoch(tmp_path):
    train = kinetic.run("cpu:2", slices=2, retries=1)(fits)
    # 4 batches each: the ninth is the first of the third epoch.
    dies = {"folder": str(tmp_path / "run"), "die_in": 9, "local_every": None}
    (epochs, losses), (_, whole) = train(
        {"epochs": 4} | dies, {"epochs": 4, "folder": str(tmp_path / "whole")}
    )
    assert len(whole) == 4
    assert epochs[-1] == 3
    assert len(epochs) in (2, 3), "the end of the second epoch may not have been committed"
    assert losses == whole[epochs[0] :]
