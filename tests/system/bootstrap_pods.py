"""Simulated pods from a bare image: a Python interpreter with pip only, a store, and a folder of
wheels instead of a package index."""

from __future__ import annotations

import base64
import ensurepip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest

from kinetic._core import layout
from kinetic._source import runtime
from kinetic._store.local import LocalStore

PATIENCE_S = 200.0
UNUSABLE, DAMAGED, MISSING, UNREACHABLE, FULL, DENIED, UNRESOLVED = 64, 65, 66, 69, 73, 77, 78
TEXT = runtime.bootstrap()
RUNNER = """
import importlib.metadata, json, os, sys
found = {n: importlib.metadata.version(n) for n in ("apple", "pear") if any(
    d.metadata["Name"] == n for d in importlib.metadata.distributions())}
import kinetic
print(json.dumps({"found": found, "python": sys.executable, "kinetic": kinetic.__file__}))
"""


def package(runner=RUNNER):
    """Return the bytes of an archive like kinetic's, the same at each call. Its runner prints as
    JSON the packages that it finds, and the paths of its interpreter and code."""
    archive_bytes = io.BytesIO()
    with zipfile.ZipFile(archive_bytes, "w") as archive:
        archive.writestr(zipfile.ZipInfo("kinetic/__init__.py"), "")
        archive.writestr(zipfile.ZipInfo("kinetic/runner/__init__.py"), "")
        archive.writestr(zipfile.ZipInfo("kinetic/runner/__main__.py"), runner)
    return archive_bytes.getvalue()


def wheel(folder, name, version="1.0", scripts=()):
    """Write a wheel of a package with one empty module and these scripts."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **{f"{name}-{version}.data/scripts/{each}": text for each, text in dict(scripts).items()},
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')}"
        f",{len(data)}\n"
        for path, data in files.items()
    )
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            about = zipfile.ZipInfo(path)
            about.external_attr = 0o100755 << 16
            archive.writestr(about, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """An interpreter as in a slim image, with pip and no other package."""
    folder = tmp_path_factory.mktemp("image")
    bundled = list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    venv.create(folder, symlinks=True, with_pip=not bundled)
    for path in bundled:  # Do as `ensurepip` does, but not for 10 s.
        zipfile.ZipFile(path).extractall(site_packages(folder))
    return folder / "bin" / "python"


def site_packages(environment):
    return sysconfig.get_path("purelib", "venv", {"base": str(environment)})


class Pod:
    """A simulated pod: an interpreter, environment variables, a store and a package index."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        self.store = LocalStore(folder / "store")
        self.home = folder / "tmp" / f"kinetic-pod-{os.getuid()}"
        self.wheels, self.bin = folder / "wheels", folder / "bin"
        self.wheels.mkdir(parents=True)
        self.bin.mkdir()
        (folder / "tmp").mkdir()
        self.message = folder / "termination-log"
        self.text = TEXT.replace("/dev/termination-log", str(self.message))
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "TMPDIR": str(folder / "tmp"),
            "HOME": str(folder),
            "KINETIC_STORE": str(folder / "store"),
            "KINETIC_POD_PATIENCE_S": "0.3",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "UV_OFFLINE": "1",
            "UV_NO_CONFIG": "1",
        }
        self.message.touch()

    def holds(self, data):
        digest = hashlib.sha256(data).hexdigest()
        self.store.put(layout.blob(digest), data, if_absent=True)
        return digest

    def sends(self, archive=None):
        self.env["KINETIC_RUNTIME"] = self.holds(package() if archive is None else archive)

    def requires(self, *lines):
        text = "".join(f"{line}\n" for line in lines)
        self.env["KINETIC_REQUIREMENTS"] = self.holds(text.encode())

    def has_uv(self, instead=""):
        """Put a `uv` on the PATH that records its calls, then runs `instead` or else the real
        uv."""
        real = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert real, "the development extra installs uv"
        script = self.bin / "uv"
        script.write_text(
            f'#!/bin/sh\necho $$ $* >> {self.calls}\n{instead or "exec " + real} "$@"\n'
        )
        script.chmod(0o755)

    @property
    def calls(self):
        return self.folder / "calls"

    def start(self, stdin=None):
        return subprocess.Popen(
            [str(self.python), "-c", self.text],
            env=self.env,
            cwd="/",
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self):
        process = self.start()
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def becomes(self):
        code, out, err = self.run()
        assert code == 0, err
        return eval(out), err

    def fails(self, code):
        got, _, err = self.run()
        assert (got, "Traceback" in err) == (code, False), err
        message = self.message.read_text()
        assert message
        assert f"kinetic: {message}\n" in err
        return message


@pytest.fixture
def pod(tmp_path, bare_python):
    new_pod = Pod(tmp_path, bare_python)
    new_pod.sends()
    return new_pod


def await_file(path):
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
