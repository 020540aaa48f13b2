"""Each simulated host has its own folder in memory, at a path that is equal on all hosts, before
and after failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gangs import wait_until
from on_hosts import INIT, find_folder, join_as_told, join_when_alone, list_marks, list_marks_twice

import kinetic
from kinetic._host.worker.mounts import unshare
from kinetic._system import memory_folder


def _can_unshare():
    pid = os.fork()
    if pid == 0:
        try:
            unshare()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


pytestmark = [
    pytest.mark.skipif(not _can_unshare(), reason="namespaces are not allowed here"),
    pytest.mark.settles_within(30),
]


def test_hosts_have_a_folder_of_their_own():
    handle = kinetic.run("tpu-v6e-8", all_hosts=True)(list_marks).run_async()
    (first, second) = handle.results(timeout=200)
    assert first[0] == second[0]
    assert (first[2], second[2]) == ([INIT, "mark-0"], [INIT, "mark-1"])
    assert memory_folder.of_job(handle.job_id).exists(), "it stays as long as the job is there"
    handle.result()
    assert not memory_folder.of_job(handle.job_id).exists()


def test_it_is_the_same_in_the_next_attempt():
    handle = kinetic.run("tpu-v6e-8", retries=1, all_hosts=True)(list_marks_twice).run_async()
    (first, second) = handle.results(timeout=200)
    assert (first[1], second[1]) == (["1-0", INIT], ["1-1", INIT])
    handle.cleanup()


def test_a_file_in_the_folder_says_which_process_of_jax_a_host_is():
    handle = kinetic.run("tpu-v6e-8", retries=1, all_hosts=True)(join_as_told).run_async()
    assert handle.results(timeout=200) == [(0, 0, 8, "", "0"), (1, 1, 8, "", "1")]
    handle.cleanup()


def test_a_host_that_is_left_alone_is_told_that_it_is_the_first(monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    train = kinetic.run("tpu-v6e-4", slices=(1, 2), on_slice_loss="shrink")(join_when_alone)
    handle = train.run_async()
    assert handle.result(timeout=200) == ("0", 1)


def test_a_folder_that_the_user_names_is_kept_for_other_jobs(tmp_path):
    named = {"KINETIC_LOCAL_DIR": str(tmp_path / "run-42")}
    train = kinetic.run("tpu-v6e-8", env=named, all_hosts=True)(list_marks)
    for before in ([[INIT], [INIT]], [["first-0", INIT], ["first-1", INIT]]):
        handle = train.run_async("first")
        marks = handle.results(timeout=200)
        assert [each[0] for each in marks] == [str(tmp_path / "run-42")] * 2
        assert [each[1] for each in marks] == before
        handle.cleanup()
    assert (tmp_path / "run-42" / "host-1" / "first-1").exists()


def test_with_data_mounted_too(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.txt").write_text("a")

    @kinetic.run("cpu:2", slices=2, all_hosts=True, volumes={"/data/i": kinetic.Data(tmp_path)})
    def read():
        text = Path("/data/i/images/a.txt").read_text()
        return text, os.environ["KINETIC_HOST_INDEX"], os.environ["KINETIC_LOCAL_DIR"]

    handle = read.run_async()
    (first, second) = handle.results(timeout=200)
    assert (first[:2], second[:2]) == (("a", "0"), ("a", "1"))
    assert first[2] == second[2]


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_a_folder_that_nobody_uses_goes_with_the_job(accelerator):
    handle = kinetic.run(accelerator)(find_folder).run_async()
    handle.wait(timeout=200)
    folder = memory_folder.of_job(handle.job_id)
    wait_until(lambda: not folder.exists(), "it was left behind")
    assert handle.result()


CODE = """
    import ctypes, json, os, sys
    from kinetic._host.worker import home, mounts

    top, forbidden = sys.argv[1:]
    if forbidden == "nobody":
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    elif forbidden:
        def refuse(name, *_):
            if name == forbidden:
                raise OSError(1, "Operation not permitted")
        mounts._call = refuse
    for each in ("own", "place"):
        os.makedirs(f"{top}/{each}", exist_ok=True)
    here = home.Home(f"{top}/own", f"{top}/place", 2, 4)
    moved_in = home.enter(here)
    folder = here.variables(moved_in=moved_in)["KINETIC_LOCAL_DIR"]
    open(f"{folder}/mark", "w").close()
    try:
        mounts._call("umount2", os.fsencode(f"{top}/place"), 2)
        undone = True
    except OSError:
        undone = False
    print(json.dumps([moved_in, folder.rpartition("/")[2], undone]))
"""


def enter_folder(tmp_path, how):
    top = tmp_path / "top"
    top.mkdir()
    top.chmod(0o777)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == "root" and "pytest" in str(folder):
            folder.chmod(0o755)
    command = [sys.executable, "-c", textwrap.dedent(CODE), str(top), how]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=100)
    assert done.returncode == 0, done.stderr
    assert (top / "own" / "mark").exists()
    return json.loads(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_without_rights_has_them_too_and_cannot_undo_it(tmp_path):
    assert enter_folder(tmp_path, "nobody") == [True, "place", False]


@pytest.mark.parametrize("forbidden", ["unshare", "mount"])
def test_where_it_is_forbidden_folders_have_paths_of_their_own(tmp_path, forbidden):
    moved_in, folder, _ = enter_folder(tmp_path, forbidden)
    assert (moved_in, folder) == (False, "own")
