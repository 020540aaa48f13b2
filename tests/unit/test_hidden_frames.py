"""Tracebacks in notebooks: exceptions of functions and Ctrl-C show none of kinetic's frames."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest
import remote_cases

import kinetic
from kinetic._client import submission
from kinetic._client.handle import JobHandle

OURS = f"{Path(kinetic.__file__).parent}/"
backend = remote_cases.backend


@kinetic.run("cpu")
def fail():
    raise ValueError("no")


def list_visible(error):
    """List the functions of kinetic whose frames IPython would show."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [
        frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name
        for frame in frames
        if frame.f_code.co_filename.startswith(OURS) and "__tracebackhide__" not in frame.f_locals
    ]


async def call():
    await fail.aio()


async def await_job():
    await fail.run_async()


async def await_with_others():
    await asyncio.gather(fail.aio(), fail.run_async())


@pytest.mark.starts_processes
@pytest.mark.parametrize("wait", [call, await_job, await_with_others])
def test_awaiting_shows_no_line_of_ours(backend, wait):
    with pytest.raises(ValueError, match="no") as caught:
        asyncio.run(wait())
    assert list_visible(caught.value) == []


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "act", [fail.run_async, lambda: fail.run_async_map([{}], max_concurrent=None), fail.plan]
)
def test_interrupted_submissions_show_no_line_of_ours(backend, monkeypatch, act):
    monkeypatch.setattr(submission, "submit", interrupt)
    monkeypatch.setattr(backend, "render", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        act()
    assert list_visible(caught.value) == []


@pytest.mark.starts_processes
@pytest.mark.parametrize("act", [JobHandle.cancel, JobHandle.cleanup])
def test_an_interrupted_cancel_shows_no_line_of_ours(backend, monkeypatch, act):
    job = fail.run_async()
    monkeypatch.setattr(backend, "cancel", interrupt)
    monkeypatch.setattr(backend, "cleanup", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        act(job)
    assert list_visible(caught.value) == []


@pytest.mark.starts_processes
def test_an_interrupted_cleanup_of_a_batch_shows_no_line_of_ours(backend, monkeypatch):
    batch = fail.run_async_map([{}], max_concurrent=None)
    batch.wait()
    monkeypatch.setattr(backend, "cleanup", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        batch.cleanup()
    assert list_visible(caught.value) == []
