"""The cache that the pods of a node share: what is half-made is not used, what is used stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bootstrap_pods
import pytest
from bootstrap_pods import (
    PATIENCE_S,
    RUNNER,
    UNUSABLE,
    package,
    wheel,
)

bare_python, pod = bootstrap_pods.bare_python, bootstrap_pods.pod


@pytest.mark.parametrize("mark", [None, "", "of another start of the node"])
def test_what_may_not_be_complete_is_made_anew(pod, mark):
    told, _ = pod.becomes()
    (folder,) = pod.cache.glob("runtime-*/")
    (folder / "complete").unlink()
    if mark is not None:
        (folder / "complete").write_text(mark)
    Path(told["kinetic"]).write_text("half of a file that was never wr")
    again, err = pod.becomes()
    assert again == told
    assert "kinetic: ready after" in err
    assert (folder / "complete").exists()


def aged(folder, days):
    then = time.time() - days * 24 * 3600
    os.utime(folder / "complete", (then, then))


def cached(pod, name, size_bytes=0):
    """Something that an earlier job has left in the node's cache."""
    folder = pod.cache / name
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(b"x" * size_bytes)
    (folder / "complete").touch()
    return folder


def test_what_no_pod_has_used_for_long_is_swept(pod):
    old, half, fresh = (cached(pod, f"env-{name}") for name in ("old", "half", "fresh"))
    aged(old, 15)
    aged(half, 15)
    (half / "complete").unlink()
    os.utime(half, (0, 0))
    aged(fresh, 13)
    pod.becomes()
    assert [old.exists(), half.exists(), fresh.exists()] == [False, False, True]
    assert not list(pod.cache.glob("env-old*"))


def test_the_longest_unused_goes_when_the_cache_is_over_its_limit(pod):
    pod.env["KINETIC_POD_CACHE_GB"] = "0.0025"
    sizes = {"a": 1_000_000, "b": 1_000_000, "c": 1_000_000}
    made = {name: cached(pod, f"env-{name}", size) for name, size in sizes.items()}
    for days, folder in zip((2, 3, 1), made.values(), strict=True):
        aged(folder, days)
    pod.becomes()
    assert {name for name, folder in made.items() if folder.exists()} == {"a", "c"}


def test_files_that_uv_has_linked_are_counted_once(pod):
    pod.env["KINETIC_POD_CACHE_GB"] = "0.0015"
    one, other = cached(pod, "env-one", 1_000_000), cached(pod, "uv-cache")
    (other / "content").unlink()
    os.link(one / "content", other / "content")
    pod.becomes()
    assert one.exists()
    assert other.exists()


def test_what_a_host_uses_is_not_swept(pod):
    pod.sends(package("import sys\nprint('up', flush=True)\nsys.stdin.read()"))
    pod.env["KINETIC_POD_CACHE_GB"] = "0"
    running = pod.start(stdin=subprocess.PIPE)
    assert running.stdout.readline() == "up\n"
    (used,) = pod.cache.glob("runtime-*/")
    pod.sends()
    pod.becomes()
    assert (used / "complete").exists()
    running.communicate("", timeout=PATIENCE_S)
    pod.sends(package(RUNNER + "#"))
    pod.becomes()
    assert not used.exists()


def test_two_pods_that_sweep_and_install_at_once(pod):
    pod.env["KINETIC_POD_CACHE_GB"] = "0"
    for number in range(3):
        wheel(pod.wheels, f"apple{number}")
    pod.has_uv()
    running = []
    for number in range(6):
        pod.requires(f"apple{number % 3}")
        running.append(pod.start())
    told = [process.communicate(timeout=PATIENCE_S) for process in running]
    assert [process.returncode for process in running] == [0] * 6, told


def test_a_full_disk_is_cleared_of_what_no_pod_uses(pod):
    wheel(pod.wheels, "apple")
    pod.has_uv(
        f"test -e {pod.cache}/env-old && echo 'No space left on device' >&2 && exit 2; exec "
        + shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    )
    cached(pod, "env-old")
    pod.requires("apple")
    told, err = pod.becomes()
    assert told["found"] == {"apple": "1.0"}
    assert "the disk was full: what no pod uses was removed" in err


def test_a_limit_that_is_no_number(pod):
    pod.env["KINETIC_POD_CACHE_GB"] = "many"
    assert "'many'" in pod.fails(UNUSABLE)
