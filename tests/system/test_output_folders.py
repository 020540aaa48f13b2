"""Output folders: functions write files to a folder of the job, or to one that the caller names."""

from __future__ import annotations

import os
import subprocess
import sys

import kinetic
from kinetic._core import layout


@kinetic.run(accelerator="cpu")
def leave():
    place = os.environ["KINETIC_OUTPUT_DIR"]
    with open(os.path.join(place, "left"), "w") as file:
        file.write("x")
    return place


def test_files_are_left_in_a_folder_of_the_job(home):
    job = leave.run_async()
    assert job.result() == job.output_dir == str(home / layout.JobKeys(job.job_id).outputs)
    assert os.listdir(job.output_dir) == ["left"]
    assert kinetic.attach(job.job_id).output_dir == job.output_dir
    command = [
        sys.executable,
        "-c",
        "from kinetic.cli.main import main; main()",
        "jobs",
        "status",
        job.job_id,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert job.output_dir in done.stdout.replace("\n", ""), done


def test_a_folder_that_is_asked_for_is_made_and_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = kinetic.run(accelerator="cpu", output_dir="out/put")(leave._func)
    assert call() == str(tmp_path / "out" / "put")
    monkeypatch.setenv("KINETIC_OUTPUT_DIR", "other")
    assert leave() == str(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_what_a_host_finds_in_its_environment(tmp_path, monkeypatch):
    """Functions written for keras-kinetic find their variables, even if `capture_env_vars` copies
    those of the caller."""
    monkeypatch.setenv("KINETIC_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("KINETIC_MINE", "1")

    @kinetic.run(accelerator="tpu-v5e-4", capture_env_vars=["KINETIC_*"])
    def read_variables():
        names = (
            "KERAS_BACKEND",
            "JAX_PLATFORMS",
            "JOB_ID",
            "KINETIC_JOB_ID",
            "KINETIC_OUTPUT_DIR",
            "KINETIC_MINE",
        )
        return [os.environ.get(name) for name in names]

    job = read_variables.run_async()
    assert job.result() == ["jax", "cpu", job.job_id, job.job_id, str(tmp_path / "out"), "1"]
