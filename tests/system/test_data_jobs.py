"""Declared data in real jobs: a function gets paths with read-only content, only its worker sees
the mounts, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import kinetic
from kinetic import errors
from kinetic._core import layout
from kinetic._datasets import cached_copy
from kinetic._store.local import LocalStore
from kinetic.cli import pruning

TOP = f"/kinetic-test-{os.getpid()}"
"""A path directly below the root folder, which must not exist on this machine."""


def can_mount() -> bool:
    """True if this user may create a mount namespace, as root or in a user namespace."""
    ways = (["unshare", "-m", "true"], ["unshare", "-Urm", "true"])
    return any(subprocess.run(way, capture_output=True).returncode == 0 for way in ways)


mounting = pytest.mark.skipif(not can_mount(), reason="this machine allows no mount namespaces")


@pytest.fixture
def folder(disk_path: Path) -> Path:
    top = disk_path / "images"
    (top / "sub").mkdir(parents=True)
    (top / "a.txt").write_text("a")
    (top / "sub" / "b.txt").write_text("b")
    return top


def try_to_write(place):
    """Try to write to a file or into a folder; return "written", or the error's text."""
    import os

    try:
        with open(os.path.join(place, "new") if os.path.isdir(place) else place, "w") as file:
            file.write("x")
    except OSError as error:
        return error.strerror
    return "written"


READ_ONLY = ("Read-only file system", "Permission denied")


# -- data as arguments -----------------------------------------------------------------------------


def test_a_function_gets_plain_paths_wherever_data_was(folder):
    @kinetic.run(accelerator="cpu")
    def read_paths(where, deep, *, one):
        file = deep["list"][0]
        names = sorted(os.listdir(where))
        return (
            type(where).__name__,
            names,
            open(file).read(),
            os.path.basename(file),
            deep["list"][1] is where,
            one == where,
        )

    data = kinetic.Data(folder)
    got = read_paths(data, {"list": [kinetic.Data(folder / "a.txt"), data]}, one=data)
    assert got == ("str", ["a.txt", "sub"], "a", "a.txt", True, True)


def test_data_is_delivered_wherever_pickle_finds_it(folder):
    own, config = kinetic.Data(folder), types.SimpleNamespace(where=kinetic.Data(folder / "a.txt"))

    @kinetic.run(accelerator="cpu")
    def read_all(members, by_file, settings, more=own):
        (member,), (key,) = members, by_file
        return [type(each).__name__ for each in (own, more, member, key, settings.where)], [
            Path(own, "a.txt").read_text(),
            own == more,
            member == own,
            Path(key).read_text(),
            Path(settings.where).read_text(),
        ]

    expected = (["str"] * 5, ["a", True, True, "a", "a"])
    assert read_all({own}, {config.where: 1}, config) == expected
    batch = read_all.run_async_map([({own}, {config.where: 1}, config)] * 2)
    assert batch.results() == [expected, expected]


def test_all_hosts_and_later_jobs_share_one_copy(folder, home):
    @kinetic.run(accelerator="tpu-v6e-8", joins_jax=False)
    def list_folder(where):
        return where, os.stat(os.path.join(where, "a.txt")).st_ino

    first = list_folder(kinetic.Data(folder))
    assert list_folder(kinetic.Data(folder)) == first
    assert len(cached_copy.list_copies(home / "data")) == 1


def test_what_a_function_gets_cannot_be_changed(folder):
    @kinetic.run(accelerator="cpu")
    def spoil(where, file):
        return try_to_write(where), try_to_write(file)

    for result in spoil(kinetic.Data(folder), kinetic.Data(folder / "a.txt")):
        if os.geteuid() != 0 or can_mount():  # root ignores permissions
            assert result in READ_ONLY


def test_data_sends_nothing_twice(folder, home):
    @kinetic.run(accelerator="cpu")
    def size(where):
        return sum(len(files) for _, _, files in os.walk(where))

    assert size(kinetic.Data(folder)) == 2
    before = list_stored(home)
    assert size(kinetic.Data(folder)) == 2
    added = [kind for kind, _ in list_stored(home) - before]
    assert added in ([], ["blobs"]), "the pickled call, if it differs"


def list_stored(home):
    return {
        (kind, path.name)
        for kind in ("blobs", "packs", "trees")
        for path in (home / kind).rglob("*")
        if path.is_file()
    }


def test_each_call_of_a_batch_has_its_own_data(disk_path):
    for name in "abc":
        (disk_path / name).write_text(name * 3)

    @kinetic.run(accelerator="cpu")
    def read(file):
        return open(file).read()

    batch = read.run_async_map(
        [kinetic.Data(disk_path / name) for name in "abc"], input_mode="single"
    )
    assert batch.results() == ["aaa", "bbb", "ccc"]


@pytest.mark.parametrize("size", [1, 300_000])
def test_data_that_was_tampered_with_never_reaches_the_function(folder, home, size):
    @kinetic.run(accelerator="cpu")
    def read(where):
        return open(os.path.join(where, "a.txt")).read()

    (folder / "a.txt").write_text("a" * size)
    data = kinetic.Data(folder)
    assert read(data) == "a" * size
    (copy,) = cached_copy.list_copies(home / "data")
    file = copy.path / "files" / "a.txt"
    file.chmod(0o600)
    file.write_text("tampered")
    assert read(data) == "a" * size, "the copy is made again"
    if size > 1:  # Only a large file has its own object in the store.
        (copy,) = cached_copy.list_copies(home / "data")
        cached_copy.remove(copy)
        (blob,) = [path for path in (home / "blobs").rglob("*") if path.stat().st_size == size]
        blob.write_text("tampered")
        with pytest.raises(errors.SetupFailed, match="is damaged"):
            read(data)
    assert read(kinetic.Data(folder)) == "a" * size, (
        "the damage was taken away, so that the next call sends it again"
    )


# -- data mounted as volumes -----------------------------------------------------------------------


@mounting
def test_volumes_are_where_they_were_asked_for_and_nowhere_else(folder, disk_path):
    inside = disk_path / "machine" / "deep" / "data"
    (disk_path / "exists").mkdir()
    (disk_path / "exists" / "hidden").write_text("mine")
    at_top = [f"{TOP}{end}" for end in ("/file.txt", "-2", "/copied/a.txt", "/in-place/a.txt")]
    places = [f"{TOP}/data", str(inside), str(disk_path / "exists"), *at_top]

    @kinetic.run(
        accelerator="cpu",
        volumes={
            places[0]: kinetic.Data(folder),
            places[1]: kinetic.Data(folder, fuse=True),
            places[2]: kinetic.Data(folder),
            places[3]: kinetic.Data(folder / "a.txt"),
            places[4]: kinetic.Data(folder / "sub", fuse=True),
            f"{TOP}/copied": kinetic.Data(folder / "a.txt"),
            f"{TOP}/in-place": kinetic.Data(folder / "a.txt", fuse=True),
        },
    )
    def read_volumes():
        contents = [sorted(os.listdir(p)) if os.path.isdir(p) else open(p).read() for p in places]
        about = os.path.isdir("/proc/self"), os.path.islink("/bin"), os.getcwd()
        return contents, [try_to_write(p) for p in places], *about

    contents, written, has_proc, bin_is_link, cwd = read_volumes()
    assert contents == [*[["a.txt", "sub"]] * 3, "a", ["b.txt"], "a", "a"]
    assert set(written) <= set(READ_ONLY)
    assert (has_proc, bin_is_link) == (True, os.path.islink("/bin"))
    assert cwd.endswith("/tree") or "/tree/" in cwd
    assert not os.path.exists(TOP)
    assert not os.path.exists(f"{TOP}-2")
    assert list(inside.iterdir()) == [], "an empty folder stays, as with Docker"
    assert [p.name for p in (disk_path / "exists").iterdir()] == ["hidden"]
    assert str(disk_path) not in Path("/proc/self/mountinfo").read_text()


@mounting
def test_while_a_job_runs_nobody_else_sees_its_mounts(folder, disk_path):
    @kinetic.run(
        accelerator="cpu",
        volumes={
            f"{TOP}/data": kinetic.Data(folder),
            str(disk_path / "exists"): kinetic.Data(folder),
        },
    )
    def wait(go):
        print(os.listdir(f"{TOP}/data"), flush=True)
        with open(go) as fifo:
            fifo.read()

    (disk_path / "exists").mkdir()
    os.mkfifo(disk_path / "go")
    job = wait.run_async(str(disk_path / "go"))
    with open(disk_path / "go", "w"):  # waits until the function opens it
        assert not os.path.exists(TOP)
        assert list((disk_path / "exists").iterdir()) == []
        pids = job.processes()
        assert "/data" not in Path(f"/proc/{pids['agents'][0]}/mountinfo").read_text().replace(
            str(disk_path.parent), ""
        )
    job.result()


@mounting
def test_what_a_function_writes_beside_a_mount_is_kept(folder, disk_path):
    (disk_path / "work").mkdir()

    @kinetic.run(
        accelerator="cpu", volumes={str(disk_path / "work" / "data"): kinetic.Data(folder)}
    )
    def work(path):
        with open(path, "w") as file:
            file.write("kept")
        return os.listdir(os.path.join(os.path.dirname(path), "data")) != []

    assert work(str(disk_path / "work" / "result.txt"))
    assert (disk_path / "work" / "result.txt").read_text() == "kept"
    assert list((disk_path / "work" / "data").iterdir()) == [], "it stays, as with Docker"


@mounting
def test_a_path_that_does_not_fit_is_told(folder, disk_path):
    (disk_path / "file").write_text("x")
    call = kinetic.run(accelerator="cpu", volumes={str(disk_path / "file"): kinetic.Data(folder)})(
        os.getpid
    )
    with pytest.raises(
        errors.SetupFailed, match=r"A folder cannot be mounted at .*, which is a file"
    ):
        call()
    call = kinetic.run(
        accelerator="cpu", volumes={str(disk_path / "file" / "below"): kinetic.Data(folder)}
    )(os.getpid)
    with pytest.raises(errors.SetupFailed, match="is not a folder"):
        call()


@mounting
def test_data_that_is_mounted_and_not_copied(folder, home):
    @kinetic.run(accelerator="cpu")
    def read_mount(where, file):
        return (
            sorted(os.listdir(where)),
            os.path.basename(where),
            open(file).read(),
            try_to_write(where),
        )

    data = kinetic.Data(folder, fuse=True), kinetic.Data(folder / "a.txt", fuse=True)
    assert read_mount(*data) == (
        ["a.txt", "sub"], "images", "a", "Read-only file system",
    )  # fmt: skip
    assert cached_copy.list_copies(home / "data") == []
    assert sorted(os.listdir(folder)) == ["a.txt", "sub"]


@mounting
def test_a_folder_stands_in_for_one_of_a_bucket_that_can_be_written_to(home, caplog):
    runs = kinetic.Data("gs://bucket/runs/", writable=True)

    @kinetic.run(accelerator="tpu-v6e-8", joins_jax=False, volumes={f"{TOP}/runs": runs})
    def leave(name):
        place = f"{TOP}/runs/{name}-{os.environ['KINETIC_HOST_INDEX']}"
        with open(place, "w") as file:
            file.write(name)

    @kinetic.run(accelerator="cpu")
    def write_bucket(folder):
        return type(folder).__name__, sorted(os.listdir(folder)), try_to_write(folder)

    leave("first")
    assert f"gs://bucket/runs/ is simulated by the folder {home}/bucket-folders/bucket/runs." in (
        caplog.text
    )
    leave("second")
    assert write_bucket(kinetic.Data("gs://bucket/", writable=True)) == ("str", ["runs"], "written")
    names = ["first-0", "first-1", "second-0", "second-1"]
    assert write_bucket(runs) == ("str", names, "written")
    assert not os.path.exists(TOP)
    with pytest.raises(errors.UsageError, match="Remove fuse=True"):
        write_bucket(kinetic.Data("gs://bucket/runs/", fuse=True))


@mounting
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_without_rights_mounts_too_and_cannot_undo_it(folder, disk_path):
    """Mount data as the user `nobody`, in a user namespace: the mounts are read-only, and cannot be
    undone. Import kinetic first: `nobody` may not read its files."""
    code = textwrap.dedent("""
        import ctypes, json, os, sys
        from kinetic._host.worker import mounts

        source, scratch, top = sys.argv[1:]
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        # a process that changed its user owns nothing below /proc/self else
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        mounts.enter(
            [mounts.Mount(source, top + "/data"), mounts.Mount(source, "/etc/kinetic-test/x")],
            scratch=scratch,
        )
        told = [
            sorted(os.listdir(top + "/data")),
            sorted(os.listdir("/etc/kinetic-test/x")),
            os.getuid(),
        ]
        for act in (
            lambda: open(top + "/data/new", "w"),
            lambda: mounts._call("umount2", os.fsencode(top + "/data"), 2),
            lambda: mounts._mount(None, top + "/data", 32 | 4096),
        ):
            try:
                act()
                told.append("done")
            except OSError as error:
                told.append(error.errno)
        print(json.dumps(told))
    """)
    for parent in [disk_path, *disk_path.parents]:
        if parent.owner() == "root" and "pytest" in str(parent):
            parent.chmod(0o755)
    os.chmod(disk_path, 0o777)
    command = [sys.executable, "-c", code, str(folder), str(disk_path / "cover"), TOP]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["a.txt", "sub"], ["a.txt", "sub"], 65534, 30, 1, 1]
    assert not os.path.exists(TOP)
    assert not os.path.exists("/etc/kinetic-test")


def test_where_mounting_is_forbidden_it_says_what_to_do(folder, disk_path):
    code = textwrap.dedent("""
        import errno, os, sys
        from kinetic._host.worker import mounts

        def forbidden(name, *_):
            raise OSError(errno.EPERM, f"{name}: Operation not permitted")

        mounts._call = forbidden
        mounts.enter([mounts.Mount(sys.argv[1], sys.argv[1], optional=True)], scratch=sys.argv[2])
        print("guards are optional")
        mounts.enter([mounts.Mount(sys.argv[1], "/data")], scratch=sys.argv[2])
    """)
    command = [sys.executable, "-c", code, str(folder), str(disk_path / "cover")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "guards are optional\n"
    assert "SetupFailed: The data at /data cannot be mounted" in done.stderr
    assert "Pass the data as an argument instead" in done.stderr


def test_data_in_a_module_that_a_host_imports_must_be_passed(folder, disk_path):
    """A module with settings and a `Data` is imported on the host, which has only the data of the
    call."""
    (disk_path / "pyproject.toml").touch()
    (disk_path / "config.py").write_text(
        "import kinetic\nRATE = 0.1\n"
        'IMAGES, MORE = kinetic.Data("images"), kinetic.Data("images/sub")\n'
    )
    script = disk_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os
            import config, kinetic

            @kinetic.run(accelerator="cpu")
            def read(images):
                return config.RATE, sorted(os.listdir(images))

            @kinetic.run(accelerator="cpu")
            def read_another(images):
                return os.listdir(config.MORE)

            print(read(config.IMAGES))
            read_another(config.IMAGES)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=disk_path
    )
    assert done.stdout == "(0.1, ['a.txt', 'sub'])\n", done.stderr
    last = [line for line in done.stderr.splitlines() if "errors.DataNotFound: " in line][-1]
    assert "images/sub on this host. A host has only the data of the call" in last


# -- mounts that need a cluster --------------------------------------------------------------------


def test_what_only_a_cluster_mounts_is_refused_here_before_anything_is_created(home):
    call = kinetic.run(accelerator="cpu")(len)
    with pytest.raises(errors.UsageError, match="Remove fuse=True"):
        call(kinetic.Data("gs://bucket/images/", fuse=True))
    assert not (home / "jobs").exists()


def test_an_output_folder_of_the_cloud_reaches_the_function_as_it_is():
    call = kinetic.run(accelerator="cpu", output_dir="gs://bucket/out")(os.getenv)
    assert call("KINETIC_OUTPUT_DIR") == "gs://bucket/out"


# -- pruning ---------------------------------------------------------------------------------------


def test_prune_removes_data_that_no_job_names(folder, home):
    @kinetic.run(accelerator="cpu")
    def list_folder(where):
        return os.listdir(where) != []

    job = list_folder.run_async(kinetic.Data(folder))
    assert job.result()
    store, forever = LocalStore(home), 1e12
    swept = pruning.sweep(store, older_than=forever)
    assert (swept.data, len(cached_copy.list_copies(home / "data"))) == ((), 1), (
        "the job's plan names it"
    )
    job.cleanup()
    assert pruning.find_unused(store, older_than=0.0).data == (), "it is too young"
    (removed,) = pruning.sweep(store, older_than=forever).data
    assert cached_copy.list_copies(home / "data") == []
    assert list(store.list(layout.BLOBS)) == []
    assert removed.digest


def test_what_is_being_fetched_is_said_and_what_cannot_be_is_not_the_source(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    # Start a zygote now: it must not get the variables that are set below.
    assert kinetic.run(accelerator="cpu")(os.getpid)()
    requested, gate = threading.Event(), threading.Event()

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            # The caller uses urllib, so this is the host's request.
            if not self.headers["User-Agent"].startswith("Python-urllib"):
                requested.set()
                gate.wait()
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        job = kinetic.run(accelerator="cpu")(os.listdir).run_async(
            kinetic.Data("hf://datasets/owner/images")
        )
        assert requested.wait(120)  # The caller's request does not set this.
        command = [sys.executable, "-m", "kinetic", "jobs", "list"]
        words, printed, deadline = "it is fetching hf://owner/images", "", time.monotonic() + 120
        while words not in printed and time.monotonic() < deadline:
            listed = subprocess.run(command, capture_output=True, text=True)
            printed = " ".join(listed.stdout.split())
        gate.set()
        with pytest.raises(errors.SetupFailed) as caught:
            job.result()
        server.shutdown()
        thread.join()
    assert words in printed, listed.stderr
    message = str(caught.value)
    assert (
        "The data of the job could not be fetched: hf://owner/images could not be read" in message
    )
