"""Programs for all hosts of a slice, for tests of how the hosts' processes join one JAX world."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kinetic

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
TWO = "tpu-v6e-8"
PROXIES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "grpc_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "GRPC_PROXY",
)
NOWHERE = "http://127.0.0.1:9"
"""The address of a proxy that does not answer."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def run(project: Path, *argv: str, accelerator: str = TWO, **variables: str) -> list[str]:
    """Run a program on all hosts; return the sorted lines of their output."""
    env = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}
    done = subprocess.run(
        [*KINETIC, "run", "-a", accelerator, "--all-hosts", *argv],
        cwd=project,
        env=env | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proxy" not in done.stderr.lower(), done.stderr
    return sorted(done.stdout.splitlines())


def write(project: Path, name: str, text: str) -> str:
    (project / name).write_text(textwrap.dedent(text))
    return name


JOINS = """
    import jax
    assert not jax.distributed.is_initialized()
    jax.distributed.initialize()
    assert jax.distributed.is_initialized()
    print(jax.process_index(), jax.process_count(), jax.device_count())
"""
