"""Projects and scripts for the tests that a host has one copy of each class, as its caller does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ABSENT = str(Path(__file__).resolve().parents[1] / "absent")


def run(folder: Path, files: dict[str, str], main: str = "main.py") -> str:
    """Write a project and run its main script; return its output."""
    (folder / "pyproject.toml").touch()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, main],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": ABSENT},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


CONFIG = """
import abc, dataclasses, enum

class Color(enum.Enum):
    RED = 1

class ConfigError(Exception):
    pass

@dataclasses.dataclass
class Config:
    width: int = 1

class Shape(abc.ABC):
    pass

CACHE = {}

def square(x):
    return x * x
"""
