"""Start jobs of hostile functions, and read all that their caller can read about them."""

from __future__ import annotations

import pytest

import kinetic
from kinetic import errors
from kinetic._client.handle import JobHandle

PATIENCE_S = 200.0


OURS = ("/kinetic/_host/", "exit code 70")


def start(function, *args, **options) -> JobHandle:
    return kinetic.run(accelerator="cpu", **options)(function).run_async(*args)


def failure_of(handle: JobHandle, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught:
        handle.result(timeout=PATIENCE_S, stream_logs=False)
    return caught.value


def read_texts(handle: JobHandle, error: BaseException | None = None) -> str:
    """Return the job's log, the error's notes and, if the error is kinetic's own, its message."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    return (
        f"{error}\n{notes}\n{handle.logs()}"
        if isinstance(error, errors.KineticError)
        else f"{notes}\n{handle.logs()}"
    )
