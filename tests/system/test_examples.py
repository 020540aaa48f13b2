"""Each example runs as a user runs it, in a fresh home folder, and its output is checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# PYTHONPATH selects this checkout, even if kinetic is installed.
ENVIRON = {"PYTHONPATH": str(ROOT)}

pytestmark = [
    pytest.mark.timeout(600),
]  # This limit only ends a hang: machines may be slow.


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *args]
    done = subprocess.run(
        command, env=os.environ | ENVIRON, capture_output=True, text=True, cwd=ROOT, timeout=500
    )
    assert done.returncode == 0, (
        f"{script} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


def test_hello() -> None:
    lines = run("hello.py").stdout.splitlines()
    assert lines == [
        "Saying hello to world, far away from the caller",
        "Hello, world! (from another process)",
    ]


def test_two_hosts_psum_on_a_slice_that_is_announced_once_and_on_stderr() -> None:
    done = run("two_hosts_psum.py")
    announced = re.findall(
        r"^kinetic: .*tpu-v6e-8 \(2 hosts x 4 chips\)", done.stderr, re.MULTILINE
    )
    assert len(announced) == 1
    assert "kinetic:" not in done.stdout
    assert "host 0 of 2: 4 of 8 devices" in done.stdout
    assert "host 1 of 2" not in done.stdout, "only the leader's output arrives by itself"
    assert done.stdout.splitlines()[-1] == "psum over 8 devices on 2 hosts: 28"


def test_session() -> None:
    lines = run("session.py").stdout.splitlines()
    assert lines == [
        "compiling",
        "distance: 0.983",
        "refused: a rate of 2.0 would diverge",
        "distance: 0.322",
    ]


@pytest.mark.long
def test_multislice() -> None:
    lines = run("multislice.py").stdout.splitlines()
    assert lines[0] == "2 slices, 4 hosts, mesh {'data': 2, 'fsdp': 8}"
    assert lines[-1] == "loss 0.089; each device holds (8, 256) of (64, 256)"


@pytest.mark.long
def test_elastic() -> None:
    done = run("elastic.py")
    output = done.stdout + done.stderr
    assert "slice 1 lost (failure 1 of at most 3): host 0 of slice 1:" in output
    assert "begins at step 11 on 1 of 2 slices" in output
    saved = re.search(r"step (\d+) is saved on all hosts. A slice is back, so", output)
    assert saved is not None, output
    assert f"begins at step {int(saved[1]) + 1} on 2 of 2 slices" in output
    assert re.fullmatch(
        r"attempt 3 did step 39 on 2 slices: loss 0\.\d{4}", done.stdout.splitlines()[-1]
    )


@pytest.mark.long
def test_elastic_transformer(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    done = run("elastic_transformer.py", str(picture))
    assert "slice 1 lost (failure 1 of at most 3): host 0 of slice 1:" in done.stderr
    *_, repeated, loss, drawn = done.stdout.splitlines()
    # The script's kill comes at any moment, so a save or two may have been completed before.
    assert re.fullmatch(r"steps [123]1 to \d+ were repeated, with equal losses: True", repeated)
    assert loss == "loss 0.043 after 60 steps", "as without a loss of a slice"
    assert drawn == f"the loss over time: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.long
def test_preemption() -> None:
    done = run("preemption.py")
    saved = re.search(r"step (\d+) is saved on all hosts, which end now", done.stderr)
    assert saved is not None, done.stderr
    assert done.stdout.splitlines() == [
        "attempt 1 begins with step 0",
        f"attempt 2 begins with step {int(saved[1]) + 1}",
        "mean 0.1049; it should be 0.1049",
    ]


@pytest.mark.long
def test_keras_data_parallel(home: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "keras_data_parallel.py")]
    lines: list[str] = []
    ended_at_first_epoch = None
    env = os.environ | ENVIRON
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("epoch  1/") and ended_at_first_epoch is None:
                ended_at_first_epoch = [*home.glob("jobs/*/outcome.json")]
    assert process.returncode == 0, "\n".join(lines)
    assert ended_at_first_epoch == [], "the first epoch's line must arrive while the job runs"
    assert [line.split("/")[0] for line in lines if line.startswith("epoch")] == [
        f"epoch {n:2d}" for n in range(1, 11)
    ]
    last = re.fullmatch(r"test accuracy (0\.\d+|1\.000) on 16 devices of 4 hosts", lines[-1])
    assert last, lines[-1]
    assert float(last[1]) > 0.9


def test_failing_host() -> None:
    out = run("failing_host.py").stdout
    assert "caught BadShard: shard 2 has 0 rows" in out.splitlines()
    assert "host 2" in out, "the host that failed is named"
    assert "in read_shard" in out, "the remote traceback is there"


def test_detached() -> None:
    out = run("detached.py").stdout
    job_id = re.search(r"^started (job-[0-9a-f]{8})$", out, re.MULTILINE)
    assert job_id, out
    assert (
        f"{job_id[1]} is SUCCEEDED, its value is 3; it printed:\ncounted to 1\ncounted to 2\n"
        "counted to 3\n" in out
    )


@pytest.mark.long
def test_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run("checkpoint.py")
    steps = [(n, f"step {n} of 6: the weights sum to {16 * n}") for n in range(1, 7)]
    assert done.stdout.splitlines() == [
        *[line for n, line in steps if n <= 3],
        "host 1 was lost",
        "found a checkpoint of step 3",
        *[line for n, line in steps if n > 3],
        "went on after step 3, the weights sum to 96",
    ]
    assert [*tmp_path.iterdir()] == [], (
        "the example removes what it wrote to the folder for temporary files"
    )


@pytest.mark.long
def test_metrics(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    assert run("metrics.py", str(picture)).stdout.splitlines() == [
        "60 steps from 0 to 59, loss from 5.116 to 0.030, logged by attempts [1]",
        "60 steps from 0 to 59, loss from 5.116 to 0.000, logged by attempts [1, 2]",
        "before the host was lost, attempt 1 came to step 25",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_sweep() -> None:
    lines = run("sweep.py").stdout.splitlines()
    assert lines[0] == "rates of 4 rates"
    assert sorted(lines[1:5]) == [
        "input 0 succeeded",
        "input 1 succeeded",
        "input 2 succeeded",
        "input 3 failed",
    ]
    assert lines[5:] == [
        "rate 0.01: loss 1.787840",
        "rate 0.1: loss 0.000000",
        "rate 0.5: loss 0.000000",
        "rate 2.0: rate 2.0 is too large",
        "best rate: 0.5",
    ]


def test_data() -> None:
    assert run("data.py").stdout.splitlines() == [
        "{'2023': 354, '2024': 366, '2025': 378}",
        "Sales of 2023: 354",
        "Sales of 2024: 366",
        "Sales of 2025: 378",
    ]


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text()
    assert [p.name for p in EXAMPLES.glob("*.py") if f'"{p.name}"' not in source] == []


def test_the_tests_run_in_a_home_of_their_own(home: Path) -> None:
    assert os.environ["KINETIC_HOME"] == str(home)


@pytest.mark.long
def test_emergency_checkpoint() -> None:
    assert run("emergency_checkpoint.py").stdout.splitlines() == [
        "attempt 2: host 1 has step 6 from host 0",
        "attempt 3: host 1 has step 4 from the persistent tier",
        "the weights sum to 1056; expected 1056",
    ]
