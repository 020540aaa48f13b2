"""The name of kinetic's own distribution, which must never be fetched from an index."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from kinetic._source import requirements_txt
from kinetic._system import distribution

ROOT = Path(__file__).resolve().parents[2]
FORMER_NAME = "kinetic-" + "sdk"


def install_as(monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None) -> None:
    class Installed:
        requires = metadata.requires(distribution.NAME)

        @staticmethod
        def read_text(name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/me/my%20kinetic", "dir_info": {"editable": True}},
            "pip install -e '/home/me/my kinetic[dashboard]'",
        ),
        (
            {"url": "file:///home/me/kinetic", "dir_info": {}},
            "pip install '/home/me/kinetic[dashboard]'",
        ),
        (
            {"url": "file:///w/kinetic_run-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'kinetic-run[dashboard] @ file:///w/kinetic_run-1-py3-none-any.whl'",
        ),
        (
            {"url": "https://h/k.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'kinetic-run[dashboard] @ git+https://h/k.git@abc'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_kinetic_came(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, object], command: str
) -> None:
    install_as(monkeypatch, origin)
    assert distribution.make_install_command("dashboard") == command


def test_an_extra_of_an_index_is_installed_by_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    install_as(monkeypatch, None)
    command = distribution.make_install_command("dashboard")
    assert command == "pip install 'jinja2>=3.1.4' 'starlette>=0.40' 'uvicorn>=0.30'"


def test_conditions_of_an_extra_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "click>=8",
        "libtpu>=1; (sys_platform == 'linux') and extra == 'tpu'",
        'jax>=0.10; extra == "tpu"',
        "rich; extra == 'docs'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    requirements = distribution.list_extra_requirements(["tpu"])
    assert requirements == ["libtpu>=1; sys_platform == 'linux'", "jax>=0.10"]


@pytest.mark.parametrize(
    "line",
    [
        "kinetic-run",
        "Kinetic_Run>=0.1",
        FORMER_NAME,
        "keras-kinetic==0.0.4",
        "kinetic ; python_version>'3'",
    ],
)
def test_hosts_ask_no_index_for_kinetic(tmp_path: Path, line: str) -> None:
    listed = tmp_path / "requirements.txt"
    listed.write_text(f"numpy\n{line}\n")
    assert list(requirements_txt.read_lines(listed, ())) == ["numpy"]


def test_hosts_install_the_packages_of_an_extra_that_a_project_lists(tmp_path: Path) -> None:
    listed = tmp_path / "requirements.txt"
    listed.write_text("kinetic-run[hf, tls] @ file:///home/me/kinetic\n")
    lines = list(requirements_txt.read_lines(listed, ()))
    assert sorted(lines) == ["cryptography>=42", "huggingface-hub>=0.25"]


def test_other_packages_of_a_like_name_are_installed(tmp_path: Path) -> None:
    listed = tmp_path / "requirements.txt"
    listed.write_text("kinetics\nkinetic-runner\nmy-kinetic\n")
    lines = list(requirements_txt.read_lines(listed, ()))
    assert lines == ["kinetics", "kinetic-runner", "my-kinetic"]


@pytest.mark.starts_processes
def test_no_file_names_the_distribution_of_others() -> None:
    """No file has kinetic's former name: on package indexes, it is somebody else's package."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    spellings = (FORMER_NAME, FORMER_NAME.replace("-", "_"))
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    texts = {path: path.read_text(errors="ignore") for path in files if path.is_file()}
    assert [path for path, text in texts.items() if any(name in text for name in spellings)] == []
