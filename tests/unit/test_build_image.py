"""`kinetic build-image` from argv to exit code: the image and the program that builds it."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from kinetic._backends.kubernetes import images
from kinetic.cli.root import call
from kinetic.version import __version__

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Add fake programs to PATH that record their arguments and copy the folder that they build."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, then="exit 0"):
        script = folder / name
        cp, sh = shutil.which("cp", path=os.defpath), shutil.which("sh", path=os.defpath)
        script.write_text(
            f"#!{sh}\necho {name} $* >> {tmp_path}/calls\n"
            f'if [ "$1" = build ]; then {cp} -r "$4" "{tmp_path}/context"; fi\n{then}\n'
        )
        script.chmod(0o755)

    return add


def calls(tmp_path):
    file = tmp_path / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_dry_run_prints_what_would_be_built(capsys: Capture, programs, tmp_path):
    programs("docker")
    assert call(["build-image", "--repo", "ghcr.io/me", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for category in ("cpu", "gpu", "tpu"):
        assert f"# ghcr.io/me/base-{category}:{__version__}\nFROM python:{PYTHON}-slim\n" in out
    assert "#   jax[tpu]==" in out
    assert "#   cloudpickle==" in out
    assert calls(tmp_path) == []


@pytest.mark.starts_processes
def test_docker_builds_and_pushes(capsys: Capture, programs, tmp_path):
    programs("docker")
    programs("gcloud")
    words = ["build-image", "--repo", "eu-docker.pkg.dev/p/r/", "--category", "cpu", "--tag", "7"]
    assert call([*words, "--update-credentials", "-y"]) == 0
    uri = "eu-docker.pkg.dev/p/r/base-cpu:7"
    assert capsys.readouterr().out == f"{uri}\n"
    first, build, push = calls(tmp_path)
    assert first == "gcloud auth configure-docker eu-docker.pkg.dev --quiet"
    assert build.startswith(f"docker build --tag {uri} ")
    assert push == f"docker push {uri}"
    built = {path.name: path.read_bytes() for path in (tmp_path / "context").iterdir()}
    assert set(built) == {"Dockerfile", "requirements.txt", "kinetic.zip"}
    files = images.files(
        f"python:{PYTHON}-slim",
        requirements=built["requirements.txt"],
        runtime=built["kinetic.zip"],
    )
    assert files == built


@pytest.mark.starts_processes
def test_a_dockerfile_of_ones_own(programs, tmp_path, monkeypatch):
    programs("docker")
    (tmp_path / "Mine").write_text("FROM mine\n")
    monkeypatch.setenv("KINETIC_BASE_IMAGE_REPO", "ghcr.io/me")
    words = ["build-image", "--category", "gpu", "--dockerfile", str(tmp_path / "Mine"), "-y"]
    assert call(words) == 0
    assert (tmp_path / "context" / "Dockerfile").read_text() == "FROM mine\n"
    assert (tmp_path / "context" / "kinetic.zip").stat().st_size > 0


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "Give --repo or set KINETIC_BASE_IMAGE_REPO"),
        (["--repo", "ghcr.io/me"], 2, "Add --yes"),
        (["--repo", "ghcr.io/me", "--category", "npu"], 2, "npu"),
        (["--repo", "ghcr.io/me", "-y"], 4, "docker is not installed"),
        (["--repo", "us-docker.pkg.dev/p/r", "-y"], 4, "give --cluster"),
        (["--repo", "ghcr.io/me", "--update-credentials", "-y"], 4, "gcloud cannot be run"),
    ],
)
def test_what_cannot_be_built_says_what_to_do(words, code, says, programs, capsys: Capture):
    assert call(["build-image", *words]) == code
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.starts_processes
def test_a_build_that_fails(programs, tmp_path, capsys: Capture):
    programs("docker", "echo no such base >&2; exit 3")
    assert call(["build-image", "--repo", "ghcr.io/me", "--category", "cpu", "-y"]) == 4
    assert "failed with exit code 3" in " ".join(capsys.readouterr().err.split())
    assert len(calls(tmp_path)) == 1
