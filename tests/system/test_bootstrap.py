"""The command of a pod, which turns a bare image into a host, is run for real. The store is a
folder; the package index is a folder of wheels."""

from __future__ import annotations

import ast
import io
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import bootstrap_pods
import pytest
from bootstrap_pods import (
    DAMAGED,
    FULL,
    MISSING,
    PATIENCE_S,
    RUNNER,
    TEXT,
    UNREACHABLE,
    UNRESOLVED,
    UNUSABLE,
    await_file,
    package,
    site_packages,
    wheel,
)

from kinetic._backends.kubernetes import images
from kinetic._core import layout
from kinetic._source import runtime

bare_python, pod = bootstrap_pods.bare_python, bootstrap_pods.pod


def test_its_text_is_for_any_python_of_these_years():
    ast.parse(TEXT, feature_version=(3, 9))
    imported = {
        name
        for node in ast.walk(ast.parse(TEXT))
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {each.partition(".")[0] for each in imported} <= sys.stdlib_module_names
    assert len(TEXT) < 18_000


@pytest.mark.long
def test_the_runner_starts_from_a_folder(pod):
    report, err = pod.becomes()
    assert report["kinetic"].startswith(f"{pod.home}/runtime-")
    assert report["python"] == str(pod.python)
    assert "kinetic: installed kinetic in" in err
    second_report, err = pod.becomes()
    assert second_report == report
    assert "kinetic: installed kinetic in" not in err


def test_the_real_package_runs_where_its_requirements_are_met(pod, tmp_path):
    pod.python = sys.executable
    pod.sends(runtime.archive(tmp_path / "mine").data)
    pod.requires("cloudpickle>=3", "grpcio>=1.80")
    pod.has_uv()
    code, _, err = pod.run()
    assert code == 2
    assert "Do not start python -m kinetic.runner yourself" in err
    assert "installed requirements in" in err


@pytest.mark.parametrize("address", ["file://{}", "{}"])
def test_a_folder_has_two_kinds_of_address(pod, address):
    pod.env["KINETIC_STORE"] = address.format(pod.env["KINETIC_STORE"])
    pod.becomes()


# -- requirements ----------------------------------------------------------------------------------


def test_requirements_are_installed(pod):
    wheel(pod.wheels, "apple")
    pod.requires("apple==1.0")
    pod.has_uv()
    report, err = pod.becomes()
    assert report["found"] == {"apple": "1.0"}
    assert report["python"].startswith(f"{pod.home}/")
    assert "installed requirements in" in err


def test_options_that_uv_does_not_read_in_a_list_still_count(pod):
    wheel(pod.wheels, "apple", "1.0")
    wheel(pod.wheels, "apple", "2.0rc1")
    pod.requires("--pre", "--prefer-binary", "--trusted-host one.example", "apple>=1")
    pod.has_uv()
    report, _ = pod.becomes()
    assert report["found"] == {"apple": "2.0rc1"}
    assert "--allow-insecure-host=one.example" in pod.calls.read_text()


def test_uv_is_installed_where_there_is_none(pod):
    pod.has_uv()
    wheel(pod.wheels, "uv", "9.0", {"uv": (pod.bin / "uv").read_bytes()})
    (pod.bin / "uv").unlink()
    wheel(pod.wheels, "apple")
    pod.requires("apple")
    report, err = pod.becomes()
    assert report["found"] == {"apple": "1.0"}
    assert "installed uv in" in err


def test_an_index_without_uv_is_said(pod):
    wheel(pod.wheels, "apple")
    pod.requires("apple")
    assert "uv" in pod.fails(UNRESOLVED)


def test_what_the_image_holds_is_not_installed_again(pod, tmp_path):
    shutil.copytree(pod.python.parents[1], tmp_path / "image", symlinks=True)
    pod.python = tmp_path / "image" / "bin" / "python"
    wheel(pod.wheels, "apple")
    installed = zipfile.ZipFile(pod.wheels / "apple-1.0-py3-none-any.whl")
    installed.extractall(site_packages(tmp_path / "image"))
    wheel(pod.wheels, "apple", "2.0")
    wheel(pod.wheels, "pear")
    pod.has_uv()
    pod.requires("apple", "pear")
    report, _ = pod.becomes()
    assert report["found"] == {"apple": "1.0", "pear": "1.0"}
    pod.requires("apple==2.0", "pear")
    report, _ = pod.becomes()
    assert report["found"] == {"apple": "2.0", "pear": "1.0"}


def test_an_image_that_holds_everything_needs_no_store(pod):
    pod.requires("apple")
    pod.env |= {
        "KINETIC_IMAGE_RUNTIME": pod.env["KINETIC_RUNTIME"],
        "KINETIC_IMAGE_REQUIREMENTS": pod.env["KINETIC_REQUIREMENTS"],
        "KINETIC_STORE": "gs://nowhere",
        "STORAGE_EMULATOR_HOST": "127.0.0.1:9",
        "PYTHONPATH": str(pod.folder / "site"),
    }
    with zipfile.ZipFile(io.BytesIO(package())) as archive:
        archive.extractall(pod.folder / "site")
    report, _ = pod.becomes()
    assert report["kinetic"] == str(pod.folder / "site" / "kinetic" / "__init__.py")


def test_programs_find_the_driver_of_gpus(pod):
    """The bootstrap puts a node's NVIDIA driver on LD_LIBRARY_PATH before it starts Python: the
    loader reads the variable only then."""
    program = "import os; print({n: os.environ.get(n) for n in ('LD_LIBRARY_PATH', 'PATH')})"
    pod.sends(package(program))
    driver, path = pod.folder / "nvidia", pod.env["PATH"]
    pod.text = pod.text.replace("/usr/local/nvidia", str(driver))
    assert pod.becomes()[0] == {"LD_LIBRARY_PATH": None, "PATH": path}
    driver.mkdir()
    expected = {"LD_LIBRARY_PATH": f"{driver}/lib64", "PATH": f"{path}:{driver}/bin"}
    assert pod.becomes()[0] == expected
    pod.env["LD_LIBRARY_PATH"] = "/mine"
    assert pod.becomes()[0] == expected | {"LD_LIBRARY_PATH": f"/mine:{driver}/lib64"}


def build_image(files, image, pod):
    """Build an image from a Dockerfile: a copy of an interpreter, and packages from a folder of
    wheels. Return the image's environment variables."""
    shutil.copytree(pod.python.parents[1], image, symlinks=True)
    environ, home = {}, f"{image}/opt/kinetic"
    os.makedirs(home)
    text = files["Dockerfile"].decode().replace("\\\n", "").replace("/opt/kinetic", home)
    env = pod.env | {
        "PATH": f"{image}/bin:{pod.bin}:/usr/bin:/bin",
        "UV_PYTHON": f"{image}/bin/python",
        "UV_FIND_LINKS": str(pod.wheels),
    }
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "ENV":
            environ |= dict([rest.split("=", 1)])
        elif word == "COPY":
            name, place = rest.split()
            Path(place).write_bytes(files[name])
        elif word == "RUN" and "uv>=" not in rest:
            rest = rest.replace("--system", "--break-system-packages")
            subprocess.run(["/bin/sh", "-ec", rest], env=env, check=True, timeout=PATIENCE_S)
    return environ


def test_an_image_that_kinetic_has_built_starts_without_network(pod, tmp_path):
    wheel(pod.wheels, "apple")
    pod.has_uv()
    files = images.files("python:3-slim", requirements=b"apple==1.0\n", runtime=package())
    environ = build_image(files, tmp_path / "image", pod)
    pod.python = tmp_path / "image" / "bin" / "python"
    pod.requires("apple==1.0")
    nowhere = {"KINETIC_STORE": "gs://nowhere", "STORAGE_EMULATOR_HOST": "127.0.0.1:9"}
    pod.env |= environ | nowhere | {"PATH": "/nonexistent", "PIP_FIND_LINKS": "/nonexistent"}
    report, err = pod.becomes()
    assert report["found"] == {"apple": "1.0"}
    assert report["python"] == str(pod.python)
    assert report["kinetic"].startswith(str(tmp_path / "image" / "opt" / "kinetic" / "runtime"))
    assert "kinetic: the image has the right version of kinetic" in err
    pod.env["KINETIC_STORE"] = str(tmp_path / "store")
    pod.sends(package(RUNNER + "# another version"))
    report, _ = pod.becomes()
    assert report["kinetic"].startswith(f"{pod.home}/runtime-")
    assert report["found"] == {"apple": "1.0"}


def test_an_installed_kinetic_of_the_same_version_will_do(pod):
    site = pod.folder / "site"
    with zipfile.ZipFile(io.BytesIO(package())) as archive:
        archive.extractall(site)
    (site / "kinetic_run-1.5.dist-info").mkdir()
    (site / "kinetic_run-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kinetic-run\nVersion: 1.5\n"
    )
    pod.env |= {"PYTHONPATH": str(site), "KINETIC_VERSION": "1.5"}
    report, err = pod.becomes()
    assert report["kinetic"].startswith(str(site))
    assert "kinetic: the image has the right version of kinetic" in err
    for other in ("1.6", ""):
        pod.env["KINETIC_VERSION"] = other
        assert pod.becomes()[0]["kinetic"].startswith(str(pod.home))


def test_the_installer_gets_no_secret_of_the_gang(pod):
    wheel(pod.wheels, "apple")
    pod.has_uv("env > $0.env; exec false")
    pod.env |= {"KINETIC_TOKEN": "hunter2", "PIP_INDEX_URL": "http://one/simple"}
    pod.requires("apple")
    pod.fails(UNRESOLVED)
    environ = (pod.bin / "uv.env").read_text()
    assert "hunter2" not in environ
    assert "UV_DEFAULT_INDEX=http://one/simple" in environ
    assert f"UV_FIND_LINKS={pod.wheels}" in environ


def test_two_pods_with_one_folder_do_not_disturb_each_other(pod):
    wheel(pod.wheels, "apple")
    pod.has_uv()
    pod.requires("apple")
    both = [pod.start(), pod.start()]
    outputs = [process.communicate(timeout=PATIENCE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs


def test_a_pod_that_is_killed_midway_leaves_nothing_in_the_way(pod):
    wheel(pod.wheels, "apple")
    pod.requires("apple")
    pod.has_uv("exec sleep 1000 #")
    killed = pod.start()
    await_file(pod.calls)
    killed.kill()
    killed.communicate()
    os.kill(int(pod.calls.read_text().split()[0]), signal.SIGKILL)
    pod.has_uv()
    assert pod.becomes()[0]["found"] == {"apple": "1.0"}


def test_a_pod_that_is_deleted_ends_at_once(pod):
    pod.requires("apple")
    pod.has_uv("exec sleep 1000 #")
    deleted = pod.start()
    await_file(pod.calls)
    deleted.terminate()
    deleted.communicate(timeout=PATIENCE_S)
    assert deleted.returncode == 143


# -- failures --------------------------------------------------------------------------------------


def test_a_damaged_archive(pod):
    key = layout.blob(pod.env["KINETIC_RUNTIME"])
    pod.store.put(key, b"other")
    assert key in pod.fails(DAMAGED)


@pytest.mark.long
def test_content_that_was_swept_away(pod):
    pod.store.delete(layout.blob(pod.env["KINETIC_RUNTIME"]))
    assert "submit the job again" in pod.fails(MISSING)


def test_a_variable_is_missing(pod):
    del pod.env["KINETIC_STORE"]
    assert "'KINETIC_STORE' is not set" in pod.fails(UNUSABLE)


def test_a_store_that_pods_cannot_read(pod):
    pod.env["KINETIC_STORE"] = "memory://x"
    assert "memory://x" in pod.fails(UNUSABLE)


def test_a_python_that_is_too_old(pod):
    pod.text = pod.text.replace("(3, 11)", "(99, 1)")
    assert "container_image" in pod.fails(UNUSABLE)


def test_a_folder_that_cannot_be_made(pod):
    pod.home.write_text("a file")
    assert str(pod.home) in pod.fails(FULL)


def test_a_full_disk(pod):
    pod.sends(package("# " + "x" * 400_000 + RUNNER))
    small = f"mkdir -p {pod.home} && mount -t tmpfs -o size=100k kinetic-test {pod.home} && "
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*command, f"{small}true"], capture_output=True).returncode:
        pytest.skip("this machine has no mount namespaces")
    ended = subprocess.run(
        [*command, small + '"$0" -c "$1"', str(pod.python), pod.text],
        env=pod.env | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == FULL, ended.stderr
    assert "No space left" in pod.message.read_text()


@pytest.mark.parametrize(
    ("output", "code", "reason"),
    [
        ("No space left on device (os error 28)", FULL, "more ephemeral storage"),
        ("error sending request for url (https://one/simple)", UNREACHABLE, "PIP_INDEX_URL"),
        ("Because there are no versions of apple", UNRESOLVED, "no versions of apple"),
    ],
)
def test_what_an_installer_says_is_told_apart(pod, output, code, reason):
    pod.requires("apple")
    pod.has_uv(f"echo '{output}' >&2; exit 2 #")
    assert reason in pod.fails(code)


def test_a_requirement_that_does_not_exist(pod):
    pod.requires("--no-index", f"--find-links {pod.wheels}", "apple")
    pod.has_uv()
    assert "apple" in pod.fails(UNRESOLVED)


def test_an_index_that_does_not_answer(pod):
    pod.has_uv()
    del pod.env["UV_OFFLINE"]
    pod.env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    pod.requires("apple")
    assert "PIP_INDEX_URL" in pod.fails(UNREACHABLE)
