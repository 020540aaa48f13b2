"""`kinetic compile` finds the function to compile, or says why it finds none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic.cli.commands.compiling import find_function
from kinetic.errors import UsageError

FILE = "from os import getcwd\nLAYERS = 3\ndef build():\n    return print, LAYERS\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "steps_of_a_test.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    return tmp_path


@pytest.mark.parametrize("named", ["steps_of_a_test.py:build", "steps_of_a_test:build"])
def test_a_function_is_found_by_its_file_or_its_module(named: str) -> None:
    assert find_function(named)() == (print, 3)


def test_a_module_is_not_looked_for_in_a_folder_that_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = folder / "gone"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    with pytest.raises(UsageError, match="working directory no longer exists") as caught:
        find_function("steps_of_a_test:build")
    assert caught.value.__suppress_context__, "Python's own error says nothing more"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("steps_of_a_test.py", "must be named FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("steps_of_a_test.py:", "must be named FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("steps_of_a_test.py:built", "has no function 'built'. Its functions are: build."),
        ("steps_of_a_test.py:LAYERS", "has no function 'LAYERS'. Its functions are: build."),
        ("absent.py:build", "The file absent.py does not exist"),
        ("absent:build", "The module 'absent' does not exist. For a file, write absent.py"),
    ],
)
def test_what_is_not_there_is_said(named: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_function(named)
