"""Make a bare pod a host: fetch kinetic, install what the job requires, become the runner.

On success this program becomes `python -m kinetic.runner`. On failure it writes one sentence to
stderr and to the pod's termination message, and exits with a code.

Its source text is the pod's command (`python -c`). So it must stay one file that needs only the
standard library of Python 3.9 or later.

    KINETIC_STORE           a folder, file:// or gs://
    KINETIC_RUNTIME         SHA-256 of kinetic's archive
    KINETIC_REQUIREMENTS    SHA-256 of the list of requirements; empty: install nothing
    KINETIC_VERSION         use an installed kinetic of this version; empty: always fetch kinetic
    KINETIC_IMAGE_RUNTIME, KINETIC_IMAGE_REQUIREMENTS    digests of what the image already has
    KINETIC_POD_PATIENCE_S  seconds for which failed reads of a gs:// store are retried; default: 30
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import http.client
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import venv
import zipfile
from importlib import metadata
from typing import Callable

# As in sysexits.h. An unreachable store or index, and a full disk, may be temporary.
UNUSABLE, DAMAGED, MISSING, UNREACHABLE, FULL, DENIED, UNRESOLVED = 64, 65, 66, 69, 73, 77, 78
ENV = dict(os.environ)
HOME = f"{tempfile.gettempdir()}/kinetic-pod-{os.getuid()}"
PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
NVIDIA = "/usr/local/nvidia"  # GKE mounts the driver of GPUs there
AS_UV = {"INDEX_URL": "DEFAULT_INDEX", "EXTRA_INDEX_URL": "INDEX", "FIND_LINKS": "FIND_LINKS"}
NO_ANSWER = r"(?i)dns error|name resolution|sending request|connection|timed out|unreachable|tls"


class Failed(Exception):
    """This pod cannot become a host; the arguments are an exit code and a sentence."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no default action for process 1
    try:
        if sys.version_info < (3, 11):
            why = f"the image has Python {sys.version.split()[0]}, and kinetic needs 3.11 or later"
            raise Failed(UNUSABLE, f"{why}. Choose another container_image.")
        os.makedirs(HOME, mode=0o700, exist_ok=True)
        path, python = kinetic(), environment()
    except Failed as error:
        code, text = error.args
    except KeyError as error:
        code, text = UNUSABLE, f"{error} is not set: pods are started by kinetic, not by hand."
    except ValueError as error:
        code, text = UNUSABLE, f"a variable of the pod is malformed: {error}."
    except OSError as error:
        code, text = FULL, f"{HOME} cannot be used: {error}. {advice()}"
    else:
        env = dict(ENV, PYTHONPATH=os.pathsep.join(filter(None, (path, ENV.get("PYTHONPATH")))))
        if os.path.isdir(NVIDIA):  # a program reads these when it starts
            for name, folder in (("LD_LIBRARY_PATH", "lib64"), ("PATH", "bin")):
                env[name] = ":".join(filter(None, (ENV.get(name), f"{NVIDIA}/{folder}")))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the runner handles it
        os.execve(python, [python, "-m", "kinetic.runner"], env)
    say(text)
    if os.path.exists("/dev/termination-log"):
        write("/dev/termination-log", text[:4000])
    sys.exit(code)


def kinetic() -> str:
    """Return the folder that has the package; "" if the image has the right one."""
    digest, version = ENV["KINETIC_RUNTIME"], ENV.get("KINETIC_VERSION")
    if digest == ENV.get("KINETIC_IMAGE_RUNTIME") or (version and version == installed_version()):
        say("the image has the right version of kinetic")
        return ""

    folder = f"{HOME}/runtime-{digest[:24]}"
    if not os.path.isdir(folder):  # an earlier start of this pod may have unpacked it
        unpacked = make("kinetic", lambda into: unpack(digest, into))
        with contextlib.suppress(OSError):
            os.rename(unpacked, folder)
    return folder


def installed_version() -> str:
    try:
        return metadata.version("kinetic-run") if importlib.util.find_spec("kinetic.runner") else ""
    except ModuleNotFoundError:
        return ""


def environment() -> str:
    """Return the interpreter that has the requirements."""
    digest = ENV.get("KINETIC_REQUIREMENTS")
    if not digest or digest == ENV.get("KINETIC_IMAGE_REQUIREMENTS"):
        return sys.executable
    return make("requirements", lambda folder: install(folder, digest)) + "/bin/python"


def unpack(digest: str, folder: str) -> None:
    zipfile.ZipFile(io.BytesIO(fetch(digest, "kinetic's archive"))).extractall(folder)


def install(folder: str, digest: str) -> None:
    """Install into a virtual environment that comes before the image's packages."""
    text = fetch(digest, "the list of requirements").decode()
    venv.create(folder, symlinks=True)
    code = [f"import site; site.addsitedir({each!r})\n" for each in site.getsitepackages()]
    write(sysconfig.get_path("purelib", "venv", {"base": folder}) + "/image.pth", "".join(code))
    python, listed = f"{folder}/bin/python", write(f"{folder}/requirements.txt", text)
    command = [find_uv(), "pip", "install", "--no-progress", "--color=never", *uv_options(text)]
    command += ["-r", listed]
    held = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    if held - {"pip", "setuptools", "wheel", "uv"}:
        # uv reads one environment only, so it gets only what the image lacks.
        output = run([*command, "--dry-run", "--break-system-packages", "-p", sys.executable])
        write(listed, pin_missing(text, output))
        command.append("--no-deps")
    run([*command, "-p", python])


def pin_missing(text: str, output: str) -> str:
    """List exactly what a dry run (`output`) would install, after the options of `text`."""
    missing = re.findall(r"(?m)^ \+ (\S+?)(==\S+)(?: \(from (.+)\))?$", output)
    options = [line for line in text.splitlines() if line.startswith("-")]
    pins = [f"{name} @ {url}" if url else name + version for name, version, url in missing]
    return "\n".join([*options, *pins])


def uv_options(text: str) -> list[str]:
    """Return uv's options in place of those in a list of requirements that uv rejects there."""
    options = ["--prerelease=allow"] if re.search("(?m)^--pre$", text) else []
    hosts = re.findall(r"(?m)^--trusted-host (\S+)", text)
    return options + [f"--allow-insecure-host={host}" for host in hosts]


def find_uv() -> str:
    """Return the path of uv; install it with pip if the image has none."""
    command = [sys.executable, *PIP, "uv>=0.5", "--target"]
    program = shutil.which("uv") or next(glob.iglob(f"{HOME}/*/bin/uv"), None)
    return program or make("uv", lambda folder: run([*command, folder])) + "/bin/uv"


def run(command: list[str]) -> str:
    """Run an installer, without the gang's secrets, and return its output."""
    env = {k: v for k, v in ENV.items() if not k.startswith("KINETIC_")}
    for name, uvs in AS_UV.items():
        if f"PIP_{name}" in env and f"UV_{name}" not in env:  # uv's older names have precedence
            env.setdefault(f"UV_{uvs}", env[f"PIP_{name}"])
    env = {"UV_CACHE_DIR": f"{HOME}/uv-cache", "UV_PYTHON_DOWNLOADS": "never", **env}
    # SIGTERM between the installer's start and the assignment would leave the installer running.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pipe = subprocess.PIPE
    installer = subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        output = installer.communicate()[0]
    finally:
        installer.kill()
    if installer.returncode == 0:
        return output
    tail = "\n".join(output.strip().splitlines()[-20:])
    if re.search("No space left|quota exceeded", tail):
        raise Failed(FULL, f"no space is left in {HOME}. {advice()}")
    if re.search(NO_ANSWER, tail):
        why = "the package index does not answer. Let the cluster reach it, or set PIP_INDEX_URL"
        raise Failed(UNREACHABLE, f"{why} to one that it reaches.\n{tail}")
    why = "the requirements cannot be installed. Change them, or choose a container_image"
    raise Failed(UNRESOLVED, f"{why} that has them.\n{tail}")


def make(what: str, fill: Callable[[str], object]) -> str:
    """Return a new folder that `fill` has filled."""
    begun, folder = time.monotonic(), tempfile.mkdtemp(dir=HOME)
    fill(folder)
    say(f"installed {what} in {time.monotonic() - begun:.1f} s")
    return folder


def advice() -> str:
    try:
        free = f"{shutil.disk_usage(HOME).free // 10**6:,} MB are free there"
    except OSError:
        return "Give the pod a disk that it can write to."
    return f"{free}: give the pod more ephemeral storage."


def fetch(digest: str, what: str) -> bytes:
    """Return the stored content with this digest; `what` names it in errors."""
    store, key = ENV["KINETIC_STORE"], f"blobs/sha256/{digest[:2]}/{digest[2:]}"
    scheme, separator, rest = store.partition("://")
    if separator and scheme not in ("file", "gs"):
        raise Failed(UNUSABLE, f"pods cannot read {store}: use a gs:// store or a shared folder.")
    folder = urllib.parse.unquote(urllib.parse.urlsplit(store).path) if separator else store
    try:
        if scheme == "gs":
            data = from_bucket(rest, key)
        else:
            with open(f"{folder}/{key}", "rb") as file:
                data = file.read()
    except FileNotFoundError:
        raise Failed(MISSING, f"{what} is no longer in {store}: submit the job again.") from None
    except PermissionError as error:
        why = f"the pod may not read {what} in {store} ({error}): give its service account access"
        raise Failed(DENIED, f"{why} (roles/storage.objectUser for a bucket).") from error
    except (OSError, http.client.HTTPException) as error:
        why = f"{store} does not answer ({error}): let the cluster reach it"
        raise Failed(UNREACHABLE, f"{why}, and submit the job again.") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise Failed(DAMAGED, f"{what} is damaged: remove {key} from {store} and submit again.")
    return data


def from_bucket(place: str, key: str) -> bytes:
    bucket, _, prefix = place.partition("/")
    double = ENV.get("STORAGE_EMULATOR_HOST", "")
    host = double if "://" in double else f"http://{double}"
    name = urllib.parse.quote("/".join(filter(None, (prefix.strip("/"), key))), safe="")
    base = host.rstrip("/") if double else "https://storage.googleapis.com"
    url = f"{base}/download/storage/v1/b/{bucket}/o/{name}?alt=media"
    deadline = time.monotonic() + float(ENV.get("KINETIC_POD_PATIENCE_S") or 30)
    pause_s = 0.25
    while True:
        try:
            return get(url, {} if double else {"Authorization": f"Bearer {token()}"})
        except (OSError, http.client.HTTPException) as error:
            code = getattr(error, "code", 0)
            if code == 404:
                raise FileNotFoundError(name) from error
            if time.monotonic() > deadline:  # a new pod's account may be refused at first
                if code in (401, 403):
                    raise PermissionError(str(error)) from error
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 8)


def token() -> str:
    host = ENV.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    try:
        return str(json.loads(get(url, {"Metadata-Flavor": "Google"}))["access_token"])
    except (OSError, ValueError, KeyError) as error:
        raise PermissionError(f"no token from {host}: {error}") from error


def get(url: str, headers: dict[str, str]) -> bytes:
    proxies: dict[str, str] | None = {} if "Metadata-Flavor" in headers else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return bytes(answer.read())


def write(path: str, text: str) -> str:
    with open(path, "w") as file:
        file.write(text)
    return path


def say(text: str) -> None:
    sys.stderr.write(f"kinetic: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
