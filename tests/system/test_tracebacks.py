"""Tracebacks of failed calls: the caller's line, then the frames of the function, without any frame
of kinetic."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kinetic

OURS = str(Path(kinetic.__file__).parent)


def inner(x: int) -> float:
    return 1 / x


@kinetic.run(accelerator="cpu")
def train(x: int) -> float:
    try:
        return inner(x)
    except ZeroDivisionError as error:
        raise ValueError("no x") from error


@kinetic.run(accelerator="cpu")
def die() -> None:
    import os

    os._exit(3)


@kinetic.run(accelerator="cpu")
def calls_another() -> float:
    return train(0)  # In a job, this calls the function itself.


def list_frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    assert not [frame.filename for frame in frames if frame.filename.startswith(OURS)]
    return [frame.name for frame in frames]


def test_the_callers_line_leads_to_the_functions_frames() -> None:
    with pytest.raises(ValueError, match="no x") as caught:
        train(0)
    assert list_frames(caught.value) == [
        "test_the_callers_line_leads_to_the_functions_frames",
        "train",
    ]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert list_frames(caught.value.__cause__) == ["train", "inner"]


def test_a_job_without_an_exception_of_its_own_leads_to_the_call() -> None:
    with pytest.raises(kinetic.errors.HostLost) as caught:
        die()
    assert list_frames(caught.value) == [
        "test_a_job_without_an_exception_of_its_own_leads_to_the_call"
    ]


def test_within_a_job_a_call_of_another_is_a_plain_call() -> None:
    with pytest.raises(ValueError, match="no x") as caught:
        calls_another()
    assert list_frames(caught.value)[1:] == ["calls_another", "train"]
    assert str(OURS) not in "".join(caught.value.__notes__)


def test_what_fails_in_kinetic_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr("kinetic._client.following._check", fail)
        with pytest.raises(RuntimeError, match="a fault of ours") as caught:
            train(1)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["follow", "fail"]
    assert kinetic.list_jobs()[0].result() == 1.0


class Own:
    def __reduce__(self) -> str:
        raise ValueError("not me")


@pytest.mark.parametrize(("value", "own"), [((i for i in range(3)), []), (Own(), ["__reduce__"])])
@pytest.mark.parametrize("call", [train, train.run_async])
def test_what_is_refused_leads_to_the_call_and_to_the_users_own_code(
    value: object, own: list[str], call: Any
) -> None:
    with pytest.raises(kinetic.errors.PicklingError) as caught:
        call(value)
    assert list_frames(caught.value) == [
        "test_what_is_refused_leads_to_the_call_and_to_the_users_own_code"
    ]
    assert caught.value.__cause__ is not None
    assert list_frames(caught.value.__cause__) == own


def generate() -> Any:
    yield 1


MISUSES: dict[str, Callable[[], Any]] = {
    "an accelerator": lambda: kinetic.run(accelerator="a100x3"),
    "a misspelt option": lambda: kinetic.run(acelerator="cpu"),  # type: ignore[call-arg]
    "no parentheses": lambda: kinetic.run(generate),  # type: ignore[arg-type]
    "a generator": lambda: kinetic.run()(generate),
    "changed options": lambda: train.with_options(accelerator="a100x3"),
    "a call": lambda: train(y=1),  # type: ignore[call-arg]
    "a plan": lambda: train.plan(y=1),  # type: ignore[call-arg]
    "inputs": lambda: train.run_async_map([(1, 2)]),
    "an option of a batch": lambda: train.run_async_map([1], retries=-1),
    "data": lambda: kinetic.Data("not-there"),
    "a job": lambda: kinetic.attach("job-ffffffff"),
    "a batch": lambda: kinetic.attach_batch("job-ffffffff"),
    "a checkpointer": lambda: kinetic.Checkpointer(keep=0),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=list(MISUSES))
def test_misuse_leads_to_the_users_line(misuse: Callable[[], Any]) -> None:
    with pytest.raises(kinetic.errors.KineticError) as caught:
        misuse()
    assert list_frames(caught.value)[1:] == ["<lambda>"]


@kinetic.run(accelerator="tpu-v6e-8")
def fail_on_one(how: str) -> None:
    import os
    import signal
    import time

    import jax

    print("printed")
    if jax.process_index() == 0:
        time.sleep(100)
    error = ValueError("no")
    error.add_note("a note")
    ends: dict[str, Any] = {
        "raise": lambda: inner(0),
        "group": lambda: (_ for _ in ()).throw(ExceptionGroup("all", [error])),
        "exit": lambda: sys.exit("last words"),
        "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    ends[how]()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "raise",
            [
                "Traceback (most recent call last):",
                "in fail_on_one",
                "in inner",
                "return 1 / x",
                "ZeroDivisionError: ",
            ],
        ),
        (
            "group",
            [
                "Exception Group Traceback",
                "ExceptionGroup: all (1 sub-exception)",
                "ValueError: no",
                "a note",
            ],
        ),
        ("exit", ["last words"]),
        (
            "interrupt",
            ["Traceback (most recent call last):", "in fail_on_one", "\nKeyboardInterrupt\n"],
        ),
        ("kill", ["kinetic: The worker process was killed by SIGKILL"]),
    ],
)
def test_the_log_of_a_host_ends_with_how_it_failed(how: str, expected: list[str]) -> None:
    job = fail_on_one.run_async(how)
    assert not job.wait().ok
    log = job.logs(host=1)
    assert log is not None
    place = 0
    for words in ["printed\n", *expected]:
        place = log.index(words, place)
    assert log.count(expected[-1]) == 1
    assert OURS not in log
    assert (job.logs() or "").splitlines()[:1] == ["printed"]
    assert "\nkinetic: this host was stopped: host 1 of 2: " in (job.logs() or "")


def test_who_gets_the_exception_raised_sees_its_traceback_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="no x") as caught:
        train(0)
    assert capfd.readouterr().err.count("Traceback") == 0
    assert "".join(traceback.format_exception(caught.value)).count("ValueError: no x") == 1
    job = kinetic.list_jobs()[0]
    job.logs(follow=True)
    assert capfd.readouterr().err.count("ValueError: no x") == 1
    assert "Traceback" not in "".join(caught.value.__notes__), "nor among the last lines"


@kinetic.run(accelerator="cpu")
async def fails_later() -> None:
    import asyncio

    await asyncio.sleep(0)
    raise ValueError("later")


def test_the_log_of_an_async_function_has_no_frames_of_the_loop() -> None:
    job = fails_later.run_async()
    job.wait()
    frames = [line for line in job.tail().splitlines() if line.lstrip().startswith("File ")]
    assert len(frames) == 1, frames
    assert frames[0].endswith("in fails_later")


@kinetic.run(accelerator="cpu")
def takes(value: Any) -> None:
    pass


class Unloadable:
    def __reduce__(self) -> Any:
        return inner, (0,)


def test_what_fails_before_the_function_is_in_the_log_too() -> None:
    job = takes.run_async(Unloadable())
    assert not job.wait().ok
    log = job.tail()
    assert "ZeroDivisionError: division by zero\n" in log
    assert "in inner" in log
    assert "The function cannot be unpickled on this host" in log.splitlines()[-1]
    assert OURS not in log


@kinetic.run(accelerator="tpu-v6e-16")
def imports_what_is_not_there() -> None:
    import nosuchmodule  # type: ignore[import-not-found]  # noqa: F401


def test_what_fails_on_all_hosts_is_said_of_all() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        imports_what_is_not_there()
    # All four hosts, or fewer if this machine is so busy that some are late.
    assert re.search(
        r"Remote traceback \((all 4 hosts|hosts? [^)]* of 4), job-", "".join(caught.value.__notes__)
    )
    outcome = kinetic.list_jobs()[0].outcome()
    assert outcome is not None
    assert re.fullmatch(
        r"(all 4 hosts|hosts? .* of 4): ModuleNotFoundError: No module named 'nosuchmodule'",
        outcome.reason,
    )


EDITED = """
import os, sys, time, traceback
import helper, kinetic

@kinetic.run(accelerator="cpu", joins_jax=False)
@helper.Logged
def train(edited):
    while not os.path.exists(edited): time.sleep(0.01)
    helper.fail(
        "no")

handle = train.run_async(sys.argv[1])
for name in ("main.py", "helper.py"):
    text = open(name).read()
    open(name, "w").write("# edited\\n" * 3 + text)
open(sys.argv[1], "w").close()
try:
    handle.result()
except ValueError:
    traceback.print_exc()
print(handle.outcome().first.error.traceback)
"""
EDITED_TOO = """
class Logged:
    def __init__(self, func):
        self.__wrapped__ = func
        self.__name__ = "train"

    def __call__(self, *args):
        return self.__wrapped__(*args)

def fail(why):
    raise ValueError(why)
"""


def test_the_lines_of_a_file_that_was_edited_meanwhile_are_those_that_ran(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    (project / "main.py").write_text(EDITED)
    (project / "helper.py").write_text(EDITED_TOO)
    done = subprocess.run(
        [sys.executable, "main.py", str(tmp_path / "edited")],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert "in train\n    helper.fail(\n" in text
        assert "in fail\n    raise ValueError(why)\n" in text
