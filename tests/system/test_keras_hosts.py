"""Keras on several hosts, as in its guide: the error names lines that a script must add."""

from __future__ import annotations

import pytest

import kinetic


def fit(seed):
    import keras
    import numpy as np

    if seed is not None:
        keras.utils.set_random_seed(seed)
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh(
        shape=(len(devices),), axis_names=["batch"], devices=devices
    )
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones((64, 3), "float32"), np.ones(64, "float32"), batch_size=16, verbose=0)
    return "fitted"


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [(None, AssertionError, "is not the same on each process"), (0, ValueError, "auto-sharding")],
    ids=["without a seed", "with one"],
)
def test_it_says_what_is_missing(seed, error, words):
    with pytest.raises(error, match=words) as caught:
        kinetic.run(accelerator="tpu-v6e-8")(fit)(seed)
    notes = "\n".join(caught.value.__notes__)
    assert "keras.utils.set_random_seed(0) before the model is made" in notes
    assert "DataParallel(..., auto_shard_dataset=False)" in notes


def test_a_single_controller_lacks_nothing():
    assert kinetic.run(accelerator="tpu-v6e-8", controller="single")(fit)(None) == "fitted"
