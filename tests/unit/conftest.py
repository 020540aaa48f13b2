"""A unit test starts no process, unless it is marked `starts_processes`.

Marked tests need another program, such as git, uv or a fresh interpreter. Fixtures that many tests
share may start a process without a mark.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
_unmarked: list[str] = []
"""The id of the running test if it must not start a process; otherwise empty."""


def _refuse_processes(event: str, _: tuple[object, ...]) -> None:
    if event in STARTS and _unmarked:
        raise AssertionError(f"{_unmarked[0]} starts a process: mark it starts_processes")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Forbid processes in unmarked tests of this folder; pytest may call it for other folders."""
    if item.path.is_relative_to(FOLDER) and not item.get_closest_marker("starts_processes"):
        _unmarked.append(item.nodeid)
    try:
        return (yield)
    finally:
        _unmarked.clear()
