"""Scripts written for keras-kinetic run unchanged: same import, same names, same arguments, same
meanings.

Each script is a process in a folder of its own, with no cluster configured. No script uses a
feature that keras-kinetic lacks; `test_the_scripts_use_nothing_of_ours` checks that.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ROOT / "tests/absent"  # The folder hides packages that Keras imports.

pytestmark = [pytest.mark.timeout(600)]

LONG = {"keras_save_and_load", "orbax", "pathways"}
SCRIPTS = {
    "a_cpu_job": """
import kinetic


@kinetic.run(accelerator="cpu")
def mean(values, *, scale=1.0):
    import numpy as np

    print("averaging", len(values), "values")
    return float(np.mean(values)) * scale


print("mean:", mean([1.0, 2.0, 3.0], scale=10.0))
""",
    "an_exception_comes_back_as_itself": """
import kinetic


class EmptyDataset(ValueError):
    pass


@kinetic.run(accelerator="cpu")
def load(name):
    raise EmptyDataset(f"{name} has no rows")


try:
    load("train")
except EmptyDataset as error:
    print("caught:", error)
    print("remote traceback:", "in load" in error.__notes__[0])
""",
    "a_method_and_a_captured_variable": """
import os

import kinetic

os.environ["EXPERIMENT_NAME"] = "baseline"
os.environ["EXPERIMENT_SEED"] = "7"


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @kinetic.run(accelerator="cpu", capture_env_vars=["EXPERIMENT_*", "NOT_THERE"])
    def fit(self, epochs):
        return os.environ["EXPERIMENT_NAME"], int(os.environ["EXPERIMENT_SEED"]), self.rate * epochs


print(Trainer(0.5).fit(4))
""",
    "detach_and_attach": """
import time
from datetime import datetime

import kinetic
from kinetic.job_status import JobStatus


@kinetic.run(accelerator="cpu")
def train(epochs):
    for epoch in range(epochs):
        print(f"epoch {epoch} done")
        time.sleep(0.05)
    return {"epochs": epochs}


job = train.run_async(3)
assert job.job_id.startswith("job-") and job.func_name == "train" and job.accelerator == "cpu"
assert datetime.fromisoformat(job.created_at).tzinfo is not None

again = kinetic.attach(job.job_id)
seen = []
print("result:", again.result(timeout=300, stream_logs=False, on_status_change=seen.append))
assert seen[-1] == JobStatus.SUCCEEDED and again.status() == JobStatus.SUCCEEDED, seen
assert job.job_id in [each.job_id for each in kinetic.list_jobs()]
print(again.tail(1).strip())
print("lines:", len(again.logs().splitlines()))
again.cleanup(k8s=True, gcs=True)
assert job.job_id not in [each.job_id for each in kinetic.list_jobs()]
""",
    "a_timeout_leaves_the_job_running": """
import time

import kinetic


@kinetic.run(accelerator="cpu")
def slow():
    time.sleep(60)


job = slow.run_async()
try:
    job.result(timeout=0.2)
except TimeoutError:
    print("not yet")
job.cancel(cleanup_timeout=500)
print("cancelled:", job.status().value)
try:
    job.result(timeout=500)
except RuntimeError:
    print("no value")
""",
    "many_jobs": """
import kinetic
import kinetic.collections


@kinetic.run(accelerator="cpu")
def evaluate(rate, depth=1):
    if rate < 0:
        raise ValueError(f"rate {rate} is negative")
    return round(rate * depth, 3)


batch = evaluate.run_async_map([0.1, 0.2, 0.3], max_concurrent=2, name="rates")
print("singles:", batch.results())

batch = kinetic.collections.map(
    evaluate.run_async,
    [{"rate": 0.5, "depth": 2}, {"rate": 1.0, "depth": 3}],
    input_mode="kwargs",
)
print("keywords:", batch.results(timeout=300, ordered=True))

batch = kinetic.collections.map(evaluate.run_async, [(1, 2), (3, 4)])
print("pairs:", sorted(job.result() for job in batch.as_completed()), batch.group_id[:4])

batch = evaluate.run_async_map([0.1, -1.0])
batch.wait(timeout=300)
try:
    batch.results()
except kinetic.BatchError as error:
    print("failed:", len(error.failures), "partial:", error.partial_results[0])
print("as values:", [type(v).__name__ for v in batch.results(return_exceptions=True)])
again = kinetic.attach_batch(batch.group_id)
print("again:", len(again.jobs), again.status_counts() == batch.status_counts())
""",
    "data": """
from pathlib import Path

import kinetic
from kinetic import Data

folder = Path("rows")
folder.mkdir()
(folder / "a.csv").write_text("1,2,3")
(folder / "b.csv").write_text("4,5")


@kinetic.run(accelerator="cpu")
def count(rows, options):
    from pathlib import Path

    files = sorted(Path(rows).iterdir())
    extra = Path(options["extra"]).read_text()
    return {f.name: len(f.read_text().split(",")) for f in files}, extra


print(count(Data("rows"), {"extra": Data("rows/b.csv")}))
data = Data("rows")
print(data.is_dir, data.is_gcs, data.is_hf, len(data.content_hash()) > 8)
""",
    "volumes": """
from pathlib import Path

import kinetic

Path("rows").mkdir()
Path("rows/a.csv").write_text("1,2,3")


@kinetic.run(accelerator="cpu", volumes={"/volumes-of-a-script/rows": kinetic.Data("rows")})
def read():
    return open("/volumes-of-a-script/rows/a.csv").read()


print(read(), Path("/volumes-of-a-script").exists())
""",
    "data_that_is_mounted": """
from pathlib import Path

import kinetic
from kinetic import Data

top = Path("sets")
(top / "images" / "cats").mkdir(parents=True)
(top / "images" / "cats" / "tom.txt").write_text("grey")
(top / "settings.txt").write_text("rate=0.5")


images = top / "images"


@kinetic.run(
    accelerator="cpu",
    volumes={"/compat/images": Data(images, fuse=True), "/compat/copy": Data(str(images))},
)
def look(settings, rate=0.1):
    from pathlib import Path

    found = sorted(p.name for p in Path("/compat").iterdir())
    return found, Path("/compat/images/cats/tom.txt").read_text(), Path(settings).read_text(), rate


print(look(Data(top / "settings.txt", fuse=True), rate=0.2))


def job_of(volume):
    @kinetic.run(accelerator="cpu", volumes=volume)
    def names():
        import os

        return os.listdir("/compat/images")

    return names


print(job_of({"/compat/images": Data(top / "images", fuse=True)})())
""",
    "credentials_switched_off": """
import kinetic
import kinetic.credentials

kinetic.credentials.ensure_credentials = lambda *args, **kwargs: None


@kinetic.run(accelerator="cpu")
def double(number):
    return 2 * number


print(double(21))
""",
    "orbax": """
import os
import sys

import kinetic

OUT = os.path.abspath("checkpoints")


@kinetic.run(accelerator="tpu-v5litepod-4", output_dir=OUT)
def train(until):
    import os

    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    directory = os.path.join(os.environ["KINETIC_OUTPUT_DIR"], "run")
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory, options=options) as manager:
        state = {"w": jnp.zeros(4), "step": 0}
        begun = manager.latest_step()
        if begun is not None:
            state = manager.restore(begun, args=ocp.args.StandardRestore(state))
        while int(state["step"]) < until:
            state = {"w": state["w"] + 1, "step": int(state["step"]) + 1}
            manager.save(state["step"], args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return begun, float(state["w"].sum())


print(train(2), train(5), os.path.isdir(os.path.join(OUT, "run", "5")))
""",
    "keras_save_and_load": """
import os

import kinetic

OUT = os.path.abspath("models")


@kinetic.run(accelerator="cpu", output_dir=OUT)
def train():
    import os

    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), epochs=2, verbose=0)
    path = os.path.join(os.environ["KINETIC_OUTPUT_DIR"], "model.keras")
    model.save(path)
    return path, model.predict(np.ones((1, 3), "float32"), verbose=0)


@kinetic.run(accelerator="cpu", output_dir=OUT)
def load(path):
    import keras
    import numpy as np

    print("backend:", keras.backend.backend())
    return keras.models.load_model(path).predict(np.ones((1, 3), "float32"), verbose=0)


path, there = train()
print("saved here:", os.path.samefile(os.path.dirname(path), OUT), os.path.getsize(path) > 0)
print("equal:", bool((load(path) == there).all()))
""",
    "pathways": """
import kinetic


@kinetic.run(accelerator="tpu-v6e-8", backend="pathways")
def train_distributed():
    import jax
    import keras

    print(
        f"Total devices: {jax.device_count()}, "
        f"this host: {jax.process_index()} of {jax.process_count()}"
    )

    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh(
        shape=(len(devices),), axis_names=["batch"], devices=devices
    )
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    kernel = model.layers[0].kernel.value
    return len(devices), len(kernel.sharding.device_set), jax.process_index()


print("leader returned:", train_distributed())
""",
}

PRINTED = {
    "a_cpu_job": ["averaging 3 values", "mean: 20.0"],
    "an_exception_comes_back_as_itself": ["caught: train has no rows", "remote traceback: True"],
    "a_method_and_a_captured_variable": ["('baseline', 7, 2.0)"],
    "detach_and_attach": ["result: {'epochs': 3}", "epoch 2 done", "lines: 3"],
    "a_timeout_leaves_the_job_running": ["not yet", "cancelled: CANCELLED", "no value"],
    "many_jobs": [
        "singles: [0.1, 0.2, 0.3]",
        "keywords: [1.0, 3.0]",
        "pairs: [2, 12] grp-",
        "failed: 1 partial: 0.1",
        "as values: ['float', 'ValueError']",
        "again: 2 True",
    ],
    "data": ["({'a.csv': 3, 'b.csv': 2}, '4,5')", "True False False True"],
    "volumes": ["1,2,3 False"],
    "data_that_is_mounted": ["(['copy', 'images'], 'grey', 'rate=0.5', 0.2)", "['cats']"],
    "credentials_switched_off": ["42"],
    "orbax": ["(None, 8.0) (2, 20.0) True"],
    "keras_save_and_load": ["saved here: True True", "backend: jax", "equal: True"],
    "pathways": ["Total devices: 8, this host: 0 of 2", "leader returned: (8, 8, 0)"],
}

THEIRS = {
    "run": "accelerator container_image base_image_repo zone project capture_env_vars cluster "
    "backend namespace volumes spot output_dir debug",
    "result": "timeout cleanup cleanup_timeout cleanup_poll_interval stream_logs on_status_change",
    "results": "timeout ordered cleanup return_exceptions",
    "map": "input_mode max_concurrent retries fail_fast cancel_running_on_fail name tags project "
    "cluster",
    "run_async_map": "input_mode max_concurrent retries fail_fast cancel_running_on_fail name tags "
    "project cluster",
    "attach": "project cluster",
    "cleanup": "k8s gcs",
    "Data": "path fuse hf_trust_remote_code",
}
"""Keyword arguments of keras-kinetic, by function."""
PUBLIC = {
    "run",
    "Data",
    "attach",
    "list_jobs",
    "attach_batch",
    "BatchError",
    "collections",
    "credentials",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in SCRIPTS],
)
def test_a_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    # Without this file, kinetic would search the parent folders for a project.
    (tmp_path / "requirements.txt").touch()
    script = tmp_path / f"script_{name}.py"
    script.write_text(SCRIPTS[name])
    command = [sys.executable, script.name]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ABSENT}"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines() == PRINTED[name], done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_use_nothing_of_ours(name: str) -> None:
    strange = []
    for node in ast.walk(ast.parse(SCRIPTS[name])):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "kinetic"
        ):
            strange += [node.attr] * (node.attr not in PUBLIC)
        if isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            parameters = THEIRS.get(called, "").split()
            strange += [
                f"{called}({k.arg}=)"
                for k in node.keywords
                if parameters and k.arg not in parameters
            ]
    assert strange == []
