"""The archive of kinetic that pods run: equal files give equal bytes, whatever their timestamps,
and an unchanged package is not archived again."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kinetic._source import runtime
from kinetic.errors import UsageError

PACKAGE = Path(runtime.__file__).parents[1]
LONG_AGO = (1e9, 1e9)


@pytest.fixture
def package(tmp_path):
    """Create a small package `kinetic`, with old timestamps."""
    folder = tmp_path / "site-packages" / "kinetic"
    (folder / "_host").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "a.py": "A = 1\n",
        "_host/bootstrap.py": "go()\n",
    }.items():
        (folder / name).write_text(text)
    return folder


def names_in(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.namelist()


@pytest.mark.starts_processes
def test_the_archive_has_the_package_without_the_dashboard_pages(tmp_path):
    archive = runtime.archive(tmp_path)
    assert archive.blob.digest == hashlib.sha256(archive.data).hexdigest()
    assert archive.blob.size_bytes == len(archive.data) < 1_150_000
    names = names_in(archive.data)
    assert names == sorted(names)
    assert {"kinetic/runner/__main__.py", "kinetic/py.typed"} <= set(names)
    assert [n for n in names if "__pycache__" in n or n.endswith(".pyc")] == []
    listed = subprocess.run(
        ["git", "ls-files", "kinetic"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    files = {name for name in listed.stdout.split() if (PACKAGE.parent / name).exists()}
    pages = {name for name in files if name.startswith("kinetic/_dashboard/")}
    assert pages
    assert set(names) >= files - pages
    assert not pages & set(names)


@pytest.mark.starts_processes
def test_the_runner_starts_from_it(tmp_path):
    with zipfile.ZipFile(io.BytesIO(runtime.archive(tmp_path).data)) as archive:
        archive.extractall(tmp_path / "unpacked")
    env = {"PYTHONPATH": str(tmp_path / "unpacked"), "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        [sys.executable, "-m", "kinetic.runner"], env=env, cwd="/", capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "is not set. Do not start python -m kinetic.runner yourself" in ended.stderr


def test_times_modes_and_order_do_not_matter(package, tmp_path):
    first = runtime.archive(tmp_path / "cache", package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    other = tmp_path / "elsewhere" / "kinetic"
    shutil.copytree(package, other)
    for path in other.rglob("*.py"):
        path.chmod(0o755)
        os.utime(path, LONG_AGO)
    assert runtime.archive(tmp_path / "cache", other).data == first.data


def test_the_first_program_of_a_pod_is_a_file_of_the_package(package):
    assert runtime.bootstrap(package) == "go()\n"


def test_a_change_is_seen_at_once(package, tmp_path):
    before = runtime.archive(tmp_path, package)
    (package / "a.py").write_text("A = 2\n")
    after = runtime.archive(tmp_path, package)
    assert after.blob != before.blob
    (package / "b.py").write_text("")
    assert "kinetic/b.py" in names_in(runtime.archive(tmp_path, package).data)


def test_an_unchanged_package_is_taken_from_the_cache(package, tmp_path):
    # The cache trusts only files with an old ctime, which a test cannot set. So write the note that
    # the cache would write for old files.
    stamps, _ = runtime._stamp_files(package, 0)
    archive = runtime.archive(tmp_path, package)
    note = tmp_path / "runtime" / hashlib.sha256(os.fsencode(package)).hexdigest()[:32]
    assert not note.exists()
    runtime._remember(note, stamps, archive)
    assert runtime._read_note(note, stamps) == archive
    assert runtime._read_note(note, "others") is None
    note.write_bytes(note.read_bytes()[:-1])
    assert runtime._read_note(note, stamps) is None
    assert runtime.archive(tmp_path, package) == archive


def test_a_cache_that_cannot_be_written_is_done_without(package, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    assert runtime.archive(tmp_path / "cache", package).blob.size_bytes > 0


def test_an_archive_of_a_removed_package_asks_to_reinstall_kinetic(tmp_path):
    with pytest.raises(UsageError, match="Reinstall kinetic"):
        runtime.archive(tmp_path, tmp_path / "gone" / "kinetic")
