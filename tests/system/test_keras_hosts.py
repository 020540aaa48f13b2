"""Keras on several hosts, as in its guide: the error names lines that a script must add."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gangs import PATIENCE_S

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


RETURNING = """
import sys

sys.modules.update(sklearn=None, matplotlib=None)  # Keras would import both, a second each.
import keras
import numpy as np

import kinetic


class Failed(Exception):
    pass


@kinetic.run(accelerator="cpu:1", slices=2)
def train(x, y, fails):
    import jax

    keras.utils.set_random_seed(0)
    mesh = keras.distribution.DeviceMesh((2,), ["batch"], jax.devices())
    parallel = keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)
    keras.distribution.set_distribution(parallel)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=16, verbose=0)
    if fails and jax.process_index() == 0:
        error = Failed("diverged")
        error.model = model
        raise error
    return {"models": [model], "weights": model.get_weights()}


x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
returned = train(x, x[:, :1], False)
(model,), weights = returned["models"], returned["weights"]
try:
    train(x, x[:, :1], True)
except Failed as error:
    failed = error.model
for name, arrived in {"returned": model, "failed": failed}.items():
    kernel, bias = arrived.get_weights()
    assert name == "failed" or np.array_equal(kernel, weights[0]), (kernel, weights)
    assert np.allclose(arrived.predict(x, verbose=0), x @ kernel + bias, atol=1e-4)
    assert int(arrived.optimizer.iterations.value) == 2
"""


def test_a_trained_model_comes_back(tmp_path):
    """Keras pickles a model only where no collective is needed: one host packs it."""
    script = tmp_path / "script.py"
    script.write_text(RETURNING)
    env = os.environ | {"KERAS_BACKEND": "jax"}
    subprocess.run([sys.executable, str(script)], check=True, env=env, timeout=PATIENCE_S)
