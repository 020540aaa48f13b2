"""Files that are never source: results of jobs, stores, virtual environments, caches."""

from __future__ import annotations

import shutil
import sys
import time
import types
from pathlib import Path

import pytest

from kinetic._client import planning
from kinetic._config import settings as configuration
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._source import bundle, hashing, manifest, outputs, shipment, walk
from kinetic._store.local import LocalStore


def write(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(file)


def listed(packed: bundle.Bundle) -> list[str]:
    return sorted(entry.path for entry in manifest.decode(packed.manifest))


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A project folder with the module `work`, whose function `train` is called."""
    root = tmp_path.resolve() / "root"
    write(root, "pyproject.toml", "src/work.py", "results/old/model.npz")
    monkeypatch.chdir(root)
    module = types.ModuleType("work")
    module.__file__ = str(root / "src/work.py")
    exec("def train(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "work", module)
    monkeypatch.setattr(sys, "path", [str(root / "src"), *sys.path])
    return root


def frame(**options) -> planning.Planned:
    return planning.plan_function(
        sys.modules["work"].train,
        [],
        Options(topology=resolve("cpu"), **options),
        settings=configuration.load(),
        place=Place("local"),
    )


def mark(root: Path, name: str) -> None:
    """Mark an existing folder as the output folder of a job, and keep its files."""
    away = (root / name).rename(root.parent / "away")
    outputs.mark(str(root / name))
    for path in away.iterdir():
        path.rename(root / name / path.name)
    away.rmdir()


SOURCE = ["pyproject.toml", "src", "src/work.py"]
ALL = ["pyproject.toml", "results", "results/old", "results/old/model.npz", "src", "src/work.py"]


def test_results_of_this_call_and_of_earlier_ones_are_not_sent(root):
    assert listed(frame().bundle) == ALL
    assert listed(frame(output_dir="results").bundle) == SOURCE
    assert listed(frame().bundle) == ALL, "a plan alone is no job"
    mark(root, "results")
    assert listed(frame().bundle) == SOURCE
    assert listed(frame(output_dir="results/old").bundle) == SOURCE


@pytest.mark.parametrize("is_setting", [False, True])
def test_what_was_in_an_output_folder_before_any_job_is_hidden_from_no_other_call(
    root, monkeypatch, is_setting
):
    """An output folder, perhaps mistyped, already holds files. The call warns about them, and later
    calls with another output folder still send them."""
    options = {} if is_setting else {"output_dir": "results"}
    monkeypatch.setenv("KINETIC_OUTPUT_DIR", "results" if is_setting else "")
    planned = frame(**options)
    assert listed(planned.bundle) == SOURCE
    (warning,) = planned.bundle.warnings
    assert "holds files that may not come from jobs" in warning
    assert "write !results/ in .kineticignore" in warning
    outputs.mark(planned.plan.output_dir)
    monkeypatch.delenv("KINETIC_OUTPUT_DIR")
    assert listed(frame().bundle) == ALL


@pytest.mark.parametrize("files", [[], ["results/.gitignore"], ["results/a/.DS_Store"]])
def test_an_empty_output_folder_is_for_results(root, files):
    shutil.rmtree(root / "results")
    write(root, *files)
    planned = frame(output_dir="results/a")
    outputs.mark(planned.plan.output_dir)
    write(root, "results/a/model.npz")
    assert "results/a/model.npz" not in listed(frame().bundle)
    planned = frame(output_dir="results")
    outputs.mark(planned.plan.output_dir)
    write(root, "results/b.npz")
    assert "results/b.npz" not in listed(frame().bundle)
    assert planned.bundle.warnings == ()


def test_an_ignore_file_can_keep_results(root):
    write(root, "other/x")
    (root / ".kineticignore").write_text("!results/\n")
    mark(root, "results")
    mark(root, "other")
    files = listed(frame(output_dir="results").bundle)
    assert "results/old/model.npz" in files
    assert "other/x" not in files


@pytest.mark.parametrize("folder", ["src", ".", "src/.."])
def test_a_folder_with_code_is_sent_whatever_else_is_in_it(root, folder):
    packed = frame(output_dir=folder).bundle
    assert listed(packed) == ALL
    assert "also holds code" in packed.warnings[0]
    assert frame(output_dir="..").bundle.warnings == ()


def test_a_link_to_results_is_not_followed(root):
    (root / "latest").symlink_to("results/old")
    mark(root, "results/old")
    assert listed(frame(output_dir="results/old").bundle) == [*SOURCE[:1], "results", *SOURCE[1:]]


def shipped(root: Path, *data: Path, **options) -> list[str]:
    settings = shipment.SourceSettings(root.parent / "store", root.parent / "cache")
    _, packed = shipment.of(sys.modules["work"].train, settings, data=data, **options)
    assert packed is not None
    return [path for path in listed(packed) if (packed.root / path).is_file()]


def test_a_link_to_data_or_results_outside_the_project_is_not_followed(root):
    write(root.parent, "big/x.bin", "out/model.npz", "more/y")
    for name in ("big", "out", "more"):
        (root / name).symlink_to(f"../{name}")
    files = shipped(root, root / "big", output_dir=str(root / "out"))
    assert files == ["more/y", "pyproject.toml", "results/old/model.npz", "src/work.py"]
    assert "big/x.bin" in shipped(root), "it is data of that call alone"
    assert "big/x.bin" not in shipped(root, root.parent / "big")


def test_a_script_s_link_to_data_is_not_followed(root):
    write(root.parent, "big.csv")
    (root / "pyproject.toml").unlink()
    (root / "src/big.csv").symlink_to("../../big.csv")
    assert "big.csv" in shipped(root)
    assert "big.csv" not in shipped(root, root / "src/big.csv")
    assert "big.csv" in shipped(root)


def test_other_data_outside_the_project_reads_and_walks_nothing_again(root, monkeypatch):
    write(root.parent, "one/x", "two/y", "linked/z")
    (root / "linked").symlink_to("../linked")
    options = {"cache_dir": root.parent / "cache", "clock_ns": lambda: time.time_ns() + 10**10}
    first = bundle.build(root, exclude=[root.parent / "one"], **options)
    monkeypatch.setattr(walk, "scan", None)
    two = [root.parent / "two"]
    assert bundle.build(root, exclude=two, outputs=two, **options).tree == first.tree


def test_another_output_folder_for_each_call_reads_nothing_again(root, monkeypatch):
    reads, real = [], hashing.read
    monkeypatch.setattr(hashing, "read", lambda path: reads.append(path) or real(path))

    def build(name):
        options = {"cache_dir": root.parent / "cache", "clock_ns": lambda: time.time_ns() + 10**10}
        return listed(bundle.build(root, outputs=[root / "results" / name], **options))

    assert "results/old/model.npz" in build("new")
    count = len(reads)
    assert "results/old" not in build("old")
    assert "results/old/model.npz" in build("new")
    assert len(reads) <= count + 1, "the file that had been left out"


def test_a_folder_that_cannot_be_marked_does_no_harm(root):
    outputs.mark("gs://bucket/x")
    outputs.mark(str(root / "pyproject.toml/x"))
    outputs.mark(str(root / "results"))
    assert listed(frame().bundle) == ALL, "it holds files"


def build(root: Path, **options) -> list[str]:
    return listed(bundle.build(root, cache_dir=root.parent / "cache", **options))


def test_environments_and_caches_are_not_sent_whatever_their_names(root):
    write(
        root,
        "envy/pyvenv.cfg",
        "mamba/conda-meta/history",
        "mamba/bin/python",
        "kept/CACHEDIR.TAG",
        "kept/x",
    )
    assert build(root) == ALL
    assert "mamba/bin/python" in build(root, default_excludes=False)


def test_an_environment_in_the_project_s_own_folder(root):
    write(
        root,
        "pyvenv.cfg",
        "bin/python",
        "lib/python3.11/site-packages/x.py",
        "include/y.h",
        "src/lib/z.py",
    )
    assert build(root) == [*ALL[:-1], "src/lib", "src/lib/z.py", "src/work.py"]


def test_a_store_is_not_sent(root):
    store = LocalStore(root / "jobs-of-mine")
    for key in ("blobs/sha256/ab/cd", "refs/job-1.json"):
        store.put(key, b"x")
    assert build(root) == build(root, default_excludes=False) == ALL
