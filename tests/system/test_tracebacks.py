"""What a call that fails looks like: the caller's line, then the function's own frames, and nothing of ours between them."""

from __future__ import annotations

import traceback
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
    return train(0)  # within a job: the plain function


def shown(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    assert not [frame.filename for frame in frames if frame.filename.startswith(OURS)]
    return [frame.name for frame in frames]


def test_the_callers_line_leads_to_the_functions_frames() -> None:
    with pytest.raises(ValueError, match="no x") as caught:
        train(0)
    assert shown(caught.value) == ["test_the_callers_line_leads_to_the_functions_frames", "train"]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert shown(caught.value.__cause__) == ["train", "inner"]


def test_a_job_without_an_exception_of_its_own_leads_to_the_call() -> None:
    with pytest.raises(kinetic.errors.HostLost) as caught:
        die()
    assert shown(caught.value) == ["test_a_job_without_an_exception_of_its_own_leads_to_the_call"]


def test_within_a_job_a_call_of_another_is_a_plain_call() -> None:
    with pytest.raises(ValueError, match="no x") as caught:
        calls_another()
    assert shown(caught.value)[1:] == ["calls_another", "train"]
    assert str(OURS) not in "".join(caught.value.__notes__)


def test_what_fails_in_kinetic_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr("kinetic.following.follow", fail)
        with pytest.raises(RuntimeError, match="a fault of ours") as caught:
            train(1)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["_watch", "fail"]
    assert kinetic.list_jobs()[0].result() == 1.0


class Own:
    def __reduce__(self) -> str:
        raise ValueError("not me")


@pytest.mark.parametrize(("value", "own"), [((i for i in range(3)), []), (Own(), ["__reduce__"])])
@pytest.mark.parametrize("call", [train, train.run_async])
def test_what_is_refused_leads_to_the_call_and_to_the_users_own_code(value: object, own: list[str], call: Any) -> None:
    with pytest.raises(kinetic.errors.PicklingError) as caught:
        call(value)
    assert shown(caught.value) == ["test_what_is_refused_leads_to_the_call_and_to_the_users_own_code"]
    assert caught.value.__cause__ is not None
    assert shown(caught.value.__cause__) == own
