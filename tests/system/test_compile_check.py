"""`compile_check` compiles for the real chip on simulated slices; libtpu, which it needs, changes
nothing else when it is installed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kinetic
from kinetic._compile import topologies
from kinetic._compile.checked import CheckReport
from kinetic._system import processes

needs_libtpu = pytest.mark.skipif(
    not topologies.is_installed(), reason="libtpu is not installed: pip install libtpu"
)
WIDTH = 512


@kinetic.run(accelerator="tpu-v6e-8")
def train(steps: int) -> float:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    assert {device.platform for device in jax.devices()} == {"cpu"}
    split = NamedSharding(kinetic.make_mesh(), PartitionSpec("fsdp"))

    def spread(whole: NDArray[np.float32]) -> jax.Array:
        return jax.make_array_from_callback(whole.shape, split, lambda part: whole[part])

    weights = spread(np.eye(WIDTH, dtype=np.float32))
    batch = spread(np.ones((64, WIDTH), dtype=np.float32))

    @jax.jit
    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jax.lax.with_sharding_constraint(batch @ weights, split)
        return weights * 0.5, jnp.mean(hidden)

    for _ in range(steps):
        weights, mean = step(weights, batch)
    return float(mean)


def run_kinetic(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kinetic.cli.main import main; main()", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@needs_libtpu
def test_a_run_is_checked_by_the_compiler_of_the_real_slice(
    capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    assert train.with_options(compile_check=True)(2) == 0.5
    err = capfd.readouterr().err
    assert "kinetic: compiling 1 program for tpu-v6e-8" in err
    assert "1 program compiled for tpu-v6e-8: 1 fits" in err
    assert f"step ({__file__}:" in err
    assert "over fsdp  ICI" in err
    (report,) = home.glob("**/compile-report.json")  # Pages of the job show this file.
    assert str(CheckReport.read(report.read_bytes())) in err


@needs_libtpu
def test_a_function_that_raises_is_checked_too(capfd: pytest.CaptureFixture[str]) -> None:
    @kinetic.run(accelerator="tpu-v6e-1", compile_check=True)
    def fail() -> None:
        import jax

        doubled = jax.jit(lambda x: x @ x)(np.ones((WIDTH, WIDTH), dtype=np.float32))
        raise ValueError(f"{doubled.shape}")

    with pytest.raises(ValueError, match="512"):
        fail()
    assert "1 program compiled for tpu-v6e-1: 1 fits" in capfd.readouterr().err


@needs_libtpu
@pytest.mark.parametrize("moment", ["as one is started", "as one runs"])
def test_an_interrupt_ends_the_compilers_and_says_how_to_go_on(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = train.with_options(compile_check=True).run_async(1)
    handle.wait()

    def find_compilers() -> list[int]:
        pids = []
        for pid in processes.children(os.getpid()):
            with contextlib.suppress(OSError):  # it has just ended
                if b"kinetic-compile-" in processes.command_line(pid):
                    pids.append(pid)
        return pids

    def interrupt() -> None:
        while not find_compilers() and not has_ended.is_set():
            has_ended.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *command: Any, **how: Any) -> None:
            super().__init__(*command, **how)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # Let SIGINT interrupt this call.

    has_ended = threading.Event()
    interrupter = threading.Thread(target=interrupt)
    if moment == "as one runs":
        interrupter.start()
    else:
        monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        handle.compile_report()
    has_ended.set()
    if moment == "as one runs":
        interrupter.join()
    assert find_compilers() == []
    (note,) = raised.value.__notes__
    assert f'kinetic.attach("{handle.job_id}").compile_report() compiles' in note


def test_without_the_option_nothing_is_kept_and_libtpu_is_not_loaded() -> None:
    handle = train.run_async(1)
    assert handle.result() == 1.0
    with pytest.raises(kinetic.errors.UsageError, match="stored no programs"):
        handle.compile_report()


def test_workers_of_a_simulated_slice_do_not_load_libtpu() -> None:
    @kinetic.run(accelerator="tpu-v6e-1")
    def read_maps() -> str:
        import jax

        jax.numpy.ones(3).sum()
        return Path("/proc/self/maps").read_text()

    assert "libtpu" not in read_maps()


@needs_libtpu
def test_a_script_is_checked_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import jax, numpy as np\n"
        "def double(x):\n"
        "    return x @ x\n"
        "def shout(x):\n"
        "    jax.debug.print('{}', x[0, 0])\n"
        "    return x + 1\n"
        "x = np.ones((512, 512), dtype=np.float32)\n"
        "print('made', jax.jit(double)(x).shape)\n"
        "jax.jit(shout)(x)\n"
    )
    ended = run_kinetic(tmp_path, "run", "--compile-check", "-a", "tpu-v6e-1", "train.py")
    assert (ended.returncode, ended.stdout.count("made (512, 512)")) == (0, 1), ended.stderr
    assert "2 programs compiled for tpu-v6e-1" in ended.stderr
    assert "1 fits, 1 not compiled" in ended.stderr or "1 not compiled, 1 fits" in ended.stderr
    assert "calls back into Python on the host" in ended.stderr
    assert f"double ({tmp_path}/train.py:2)" in ended.stderr


STEP = """
import jax, jax.numpy as jnp, kinetic
from jax.sharding import NamedSharding, PartitionSpec
def step(x):
    return x * 2
def build():
    print("is built")
    split = NamedSharding(kinetic.make_mesh(), PartitionSpec("fsdp"))
    whole = jax.ShapeDtypeStruct((ROWS, 1 << 20), "f4", sharding=split)
    return jax.jit(step, donate_argnums=0), whole
"""


@needs_libtpu
def test_the_smallest_slice_is_found_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEP.replace("ROWS", str(1 << 14)))  # 64 GiB
    ended = run_kinetic(
        tmp_path, "compile", "-a", "tpu-v6e-16", "--fit", "--json", "steps.py:build"
    )
    assert ended.returncode == 0, ended.stderr
    tried = json.loads(ended.stdout)
    assert ended.stderr.count("is built") == len(tried)
    assert [(each["accelerator"], each["verdict"]) for each in tried] == [
        ("tpu-v6e-1", "too large"),
        ("tpu-v6e-4", "fits"),
    ]
    assert tried[-1]["memory"]["aliased"] == 16 << 30


@needs_libtpu
def test_an_error_of_the_function_itself_is_shown_with_its_line(tmp_path: Path) -> None:
    """The exit code is 2: the function failed. Code 1 would mean that its program does not fit."""
    (tmp_path / "steps.py").write_text("def build():\n    raise ValueError('oops')\n")
    ended = run_kinetic(tmp_path, "compile", "-a", "tpu-v6e-8", "steps.py:build")
    assert ended.returncode == 2
    first = ended.stderr.partition("Traceback (most recent call last):\n")[2].splitlines()[0]
    assert 'steps.py", line 2, in build' in first
    assert ended.stderr.rstrip().endswith("ValueError: oops")
