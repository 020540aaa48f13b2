"""A bare pod becomes a host: real runs of the pod's command, with folders and a bucket on a local
server for stores, and wheels in a folder for an index."""

from __future__ import annotations

import ast
import base64
import ensurepip
import hashlib
import http.server
import io
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.parse
import venv
import zipfile
from pathlib import Path

import pytest
from gcs import serving

from kinetic._core import layout
from kinetic._source import runtime
from kinetic._store.gcs import GcsStore
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
    """An archive like kinetic's, whose runner tells where it is."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("kinetic/__init__.py", "")
        archive.writestr("kinetic/runner/__init__.py", "")
        archive.writestr("kinetic/runner/__main__.py", runner)
    return made.getvalue()


def wheel(folder, name, version="1.0", scripts=()):
    """Write a wheel with one empty module."""
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
    """An interpreter as a slim image has it: pip and nothing else."""
    folder = tmp_path_factory.mktemp("image")
    bundled = list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    venv.create(folder, symlinks=True, with_pip=not bundled)
    for each in bundled:  # what ensurepip does in ten seconds
        zipfile.ZipFile(each).extractall(site_packages(folder))
    return folder / "bin" / "python"


def site_packages(environment):
    return sysconfig.get_path("purelib", "venv", {"base": str(environment)})


class Pod:
    """What a pod would be: an interpreter, variables, a store, an index."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        self.store, self.cache = LocalStore(folder / "store"), folder / "cache"
        self.wheels, self.bin = folder / "wheels", folder / "bin"
        self.wheels.mkdir(parents=True)
        self.bin.mkdir()
        self.message = folder / "termination-log"
        self.text = TEXT.replace("/dev/termination-log", str(self.message))
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "TMPDIR": os.environ["TMPDIR"],
            "HOME": str(folder),
            "KINETIC_STORE": str(folder / "store"),
            "KINETIC_POD_CACHE": str(self.cache),
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
        """Put a uv on the PATH that notes that it was called."""
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
    made = Pod(tmp_path, bare_python)
    made.sends()
    return made


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


def test_the_runner_starts_from_a_folder(pod):
    told, err = pod.becomes()
    assert told["kinetic"].startswith(f"{pod.cache}/runtime-")
    assert told["python"] == str(pod.python)
    assert "kinetic: ready after" in err
    _, err = pod.becomes()
    assert "kinetic: here from an earlier job" in err


def test_the_real_package_runs_where_its_requirements_are_met(pod, tmp_path):
    pod.python = sys.executable
    pod.sends(runtime.archive(tmp_path / "mine").data)
    pod.requires("cloudpickle>=3", "grpcio>=1.71")
    pod.has_uv()
    code, _, err = pod.run()
    assert code == 2
    assert "is started by a backend" in err
    assert "requirements: ready" in err


@pytest.mark.parametrize("address", ["file://{}", "{}"])
def test_a_folder_has_two_kinds_of_address(pod, address):
    pod.env["KINETIC_STORE"] = address.format(pod.env["KINETIC_STORE"])
    pod.becomes()


def test_without_a_cache_folder_a_temporary_one_is_used(pod, tmp_path):
    del pod.env["KINETIC_POD_CACHE"]
    pod.env["TMPDIR"] = str(tmp_path)
    told, _ = pod.becomes()
    assert told["kinetic"].startswith(f"{tmp_path}/kinetic-pod-{os.getuid()}/")


# -- requirements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_requirements_are_installed_once(pod, installer):
    wheel(pod.wheels, "apple")
    pod.requires("apple==1.0")
    if installer == "uv":
        pod.has_uv()
    told, err = pod.becomes()
    assert told["found"] == {"apple": "1.0"}
    assert told["python"].startswith(f"{pod.cache}/env-")
    assert f"requirements: installing with {installer}" in err
    (pod.wheels / "apple-1.0-py3-none-any.whl").unlink()
    again, err = pod.becomes()
    assert again == told
    assert "requirements: here from an earlier job" in err


def test_uv_is_installed_where_there_is_none(pod):
    pod.has_uv()
    wheel(pod.wheels, "uv", "9.0", {"uv": (pod.bin / "uv").read_bytes()})
    (pod.bin / "uv").unlink()
    wheel(pod.wheels, "apple")
    pod.requires("apple")
    told, err = pod.becomes()
    assert told["found"] == {"apple": "1.0"}
    assert "uv: ready after" in err
    assert (pod.cache / "uv" / "bin" / "uv").exists()


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_what_the_image_holds_is_not_installed_again(pod, tmp_path, installer):
    shutil.copytree(pod.python.parents[1], tmp_path / "image", symlinks=True)
    pod.python = tmp_path / "image" / "bin" / "python"
    wheel(pod.wheels, "apple")
    installed = zipfile.ZipFile(pod.wheels / "apple-1.0-py3-none-any.whl")
    installed.extractall(site_packages(tmp_path / "image"))
    wheel(pod.wheels, "apple", "2.0")
    wheel(pod.wheels, "pear")
    if installer == "uv":
        pod.has_uv()
    pod.requires("apple", "pear")
    told, _ = pod.becomes()
    assert told["found"] == {"apple": "1.0", "pear": "1.0"}
    pod.requires("apple==2.0", "pear")
    told, _ = pod.becomes()
    assert told["found"] == {"apple": "2.0", "pear": "1.0"}


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
    told, _ = pod.becomes()
    assert told["kinetic"] == str(pod.folder / "site" / "kinetic" / "__init__.py")


def test_an_installed_kinetic_of_the_same_version_will_do(pod):
    site = pod.folder / "site"
    with zipfile.ZipFile(io.BytesIO(package())) as archive:
        archive.extractall(site)
    (site / "kinetic_sdk-1.5.dist-info").mkdir()
    (site / "kinetic_sdk-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kinetic-sdk\nVersion: 1.5\n"
    )
    pod.env |= {"PYTHONPATH": str(site), "KINETIC_VERSION": "1.5"}
    told, err = pod.becomes()
    assert told["kinetic"].startswith(str(site))
    assert "kinetic: in the image" in err
    for other in ("1.6", ""):
        pod.env["KINETIC_VERSION"] = other
        assert pod.becomes()[0]["kinetic"].startswith(str(pod.cache))


def test_the_installer_gets_no_secret_of_the_gang(pod):
    wheel(pod.wheels, "apple")
    pod.has_uv("env > $0.env; exec false")
    pod.env |= {"KINETIC_TOKEN": "hunter2", "PIP_INDEX_URL": "http://one/simple"}
    pod.requires("apple")
    pod.fails(UNRESOLVED)
    seen = (pod.bin / "uv.env").read_text()
    assert "hunter2" not in seen
    assert "UV_DEFAULT_INDEX=http://one/simple" in seen
    assert f"UV_FIND_LINKS={pod.wheels}" in seen


def test_two_pods_of_a_node_install_once(pod):
    wheel(pod.wheels, "apple")
    pod.has_uv()
    pod.requires("apple")
    both = [pod.start(), pod.start()]
    told = [process.communicate(timeout=PATIENCE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0]
    assert len(pod.calls.read_text().splitlines()) == 1


def test_a_pod_that_is_killed_midway_leaves_nothing_in_the_way(pod):
    wheel(pod.wheels, "apple")
    pod.requires("apple")
    pod.has_uv("exec sleep 1000 #")
    killed = pod.start()
    await_file(pod.calls)
    killed.kill()
    killed.communicate()
    os.kill(int(pod.calls.read_text().split()[0]), signal.SIGKILL)
    assert list(pod.cache.glob("env-*/bin"))
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
    assert not list(pod.cache.glob("env-*/bin"))


def await_file(path):
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- the cache of a node ---------------------------------------------------------------------------


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


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_damaged_archive(pod):
    key = layout.blob(pod.env["KINETIC_RUNTIME"])
    pod.store.put(key, b"other")
    assert key in pod.fails(DAMAGED)


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


def test_a_cache_that_cannot_be_made(pod):
    pod.cache.write_text("a file")
    assert str(pod.cache) in pod.fails(FULL)


def test_a_full_disk(pod):
    pod.sends(package("# " + "x" * 400_000 + RUNNER))
    small = f"mkdir -p {pod.cache} && mount -t tmpfs -o size=100k kinetic-test {pod.cache} && "
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
    ("said", "code", "told"),
    [
        ("No space left on device (os error 28)", FULL, "larger disk"),
        ("error sending request for url (https://one/simple)", UNREACHABLE, "PIP_INDEX_URL"),
        ("Because there are no versions of apple", UNRESOLVED, "no versions of apple"),
    ],
)
def test_what_an_installer_says_is_told_apart(pod, said, code, told):
    pod.requires("apple")
    pod.has_uv(f"echo '{said}' >&2; exit 2 #")
    assert told in pod.fails(code)
    assert not list(pod.cache.glob("env-*/bin"))


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_requirement_that_does_not_exist(pod, installer):
    pod.requires("--no-index", f"--find-links {pod.wheels}", "apple")
    if installer == "uv":
        pod.has_uv()
    assert "apple" in pod.fails(UNRESOLVED)


def test_an_index_that_does_not_answer(pod):
    pod.has_uv()
    del pod.env["UV_OFFLINE"]
    pod.env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    pod.requires("apple")
    assert "PIP_INDEX_URL" in pod.fails(UNREACHABLE)


# -- a bucket --------------------------------------------------------------------------------------


class Bucket:
    """A server that answers for one bucket, and for the metadata of a machine."""

    def __init__(self, store):
        self.trouble: list[int] = []
        self.asked: list[tuple[str, str]] = []
        self.token_code, bucket = 200, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                bucket.asked.append((self.path, self.headers.get("Authorization", "")))
                if self.path.startswith("/computeMetadata"):
                    good = self.headers.get("Metadata-Flavor") == "Google"
                    self.answer(bucket.token_code if good else 403, b'{"access_token": "t0"}')
                elif bucket.trouble:
                    code = bucket.trouble.pop(0)
                    # 0: hang up in the middle
                    self.answer(code or 200, b"x", length=1 if code else 99)
                else:
                    name = urllib.parse.unquote(self.path.partition("/o/")[2].partition("?")[0])
                    key = name.removeprefix("some/prefix/")
                    there = store.has(key)
                    self.answer(200 if there else 404, store.get(key) if there else b"")

            def answer(self, code, data, length=None):
                self.send_response(code)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def bucket(pod):
    made = Bucket(pod.store)
    pod.env |= {"KINETIC_STORE": "gs://b/some/prefix", "STORAGE_EMULATOR_HOST": made.address}
    yield made
    made.close()


def test_the_runner_starts_from_a_bucket(pod, bucket):
    bucket.trouble = [503, 0, 429]
    pod.env["KINETIC_POD_PATIENCE_S"] = "100"
    pod.becomes()
    assert len(bucket.asked) == 4
    path, authorization = bucket.asked[-1]
    name = f"some%2Fprefix%2F{layout.blob(pod.env['KINETIC_RUNTIME']).replace('/', '%2F')}"
    assert path == f"/download/storage/v1/b/b/o/{name}?alt=media"
    assert authorization == ""


def test_a_pod_shows_the_token_of_its_service_account(pod, bucket):
    del pod.env["STORAGE_EMULATOR_HOST"]
    pod.text = pod.text.replace("https://storage.googleapis.com", f"http://{bucket.address}")
    pod.env |= {"GCE_METADATA_HOST": bucket.address, "http_proxy": "http://127.0.0.1:9"}
    pod.env["no_proxy"] = "127.0.0.1"
    pod.becomes()
    assert [authorization for _, authorization in bucket.asked] == ["", "Bearer t0"]
    bucket.token_code = 404
    shutil.rmtree(pod.cache)
    assert "no token from" in pod.fails(DENIED)


def test_a_bucket_that_denies(pod, bucket):
    bucket.trouble = [403] * 100
    assert "roles/storage.objectUser" in pod.fails(DENIED)


def test_an_object_that_is_gone(pod, bucket):
    pod.store.delete(layout.blob(pod.env["KINETIC_RUNTIME"]))
    pod.fails(MISSING)
    assert len(bucket.asked) == 1


def test_no_network(pod):
    pod.env |= {"KINETIC_STORE": "gs://b", "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
    assert "gs://b does not answer" in pod.fails(UNREACHABLE)


def test_what_the_store_of_buckets_sends_is_what_a_pod_fetches(pod, monkeypatch):
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        store = GcsStore("gs://bucket/some/prefix")
        store.put(layout.blob(pod.env["KINETIC_RUNTIME"]), package())
        pod.env |= {"KINETIC_STORE": store.uri, "STORAGE_EMULATOR_HOST": double.uri}
        pod.becomes()
        store.delete("blobs")
        shutil.rmtree(pod.cache)
        pod.fails(MISSING)
