"""A file of the project hides a module of the standard library: a warning names the file, and
classes in it still arrive."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import kinetic
import secrets

@kinetic.run(accelerator="cpu")
def read(own):
    return own.value + type(own).bonus

if __name__ == "__main__":
    print(read(secrets.Own()))
"""


def run(project, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("path", ["queue.py", "queue/__init__.py"])
def test_a_file_that_hides_a_module_is_named_once(tmp_path, path):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    (tmp_path / "main.py").write_text("import kinetic\nkinetic.run")
    err = run(tmp_path, "main.py").stderr
    hidden = tmp_path / path.partition("/")[0]
    assert f"{hidden} hides Python's own module 'queue' from all libraries" in err
    assert "main.py:1: RuntimeWarning" in err
    assert err.count(" hides Python") == 1


def test_nothing_is_said_of_files_that_hide_nothing(tmp_path):
    """No warning: `os` is loaded early, no library imports `test`, `queue.txt` is no module."""
    for name in ("os.py", "test.py", "queue.txt", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "main.py").write_text("import kinetic\nkinetic.run")
    assert run(tmp_path, "main.py").stderr == ""


def test_a_class_in_such_a_file_arrives(tmp_path):
    """A class in such a file is pickled by value: the host may already have imported the standard
    library's module of that name."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "secrets.py").write_text("class Own:\n    value, bonus = 1, 2\n")
    (tmp_path / "main.py").write_text(SCRIPT)
    done = run(tmp_path, "main.py")
    assert done.stdout == "3\n"
    assert done.stderr.count(" hides Python") == 1
