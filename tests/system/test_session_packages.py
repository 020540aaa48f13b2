"""What a call on a session requires and its hosts lack is installed on them, once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bootstrap_pods import wheel
from doubles.cluster.fake import FakeCluster
from doubles.cluster.fixtures import settings_of
from doubles.cluster.nodes import CPU_POOL, V6E_4X4
from gangs import wait_until

import kinetic
from kinetic._client import planning
from kinetic._core import layout
from kinetic._core.plan import Blob
from kinetic._host import bootstrap
from kinetic._host.agent.packages import AddedPackages
from kinetic._store.local import LocalStore
from kinetic.errors import PreflightError, SetupFailed

pytest.importorskip("kubernetes")


@pytest.fixture
def index(tmp_path):
    """The variables of a host whose index is a folder of wheels."""
    wheels = tmp_path / "wheels"
    for name, version in (("apple", "1.0"), ("apple", "2.0"), ("pear", "1.0")):
        wheel(wheels, name, version)
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "UV_FIND_LINKS": str(wheels),
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "UV_NO_CONFIG": "1",
    }


class Host:
    """A host of a session without processes, whose environment is this one."""

    def __init__(self, folder):
        self.store = LocalStore(folder / "store")
        self.session = self.require("cloudpickle")
        self.packages = AddedPackages(folder / "packages", self.session.requirements)

    def require(self, *lines):
        """Return the plan of a call that requires these lines."""
        data = "".join(f"{line}\n" for line in lines).encode()
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        self.store.put(layout.blob(blob.digest), data, if_absent=True)
        return SimpleNamespace(job_id="job-00000001", requirements=blob)

    def add(self, *lines):
        return self.packages.add(self.require(*lines), self.store)


@pytest.fixture
def host(tmp_path, index, monkeypatch):
    monkeypatch.setenv("PATH", index["PATH"])
    monkeypatch.setattr(bootstrap, "ENV", index)
    monkeypatch.setattr(bootstrap, "HOME", str(tmp_path / "home"))
    return Host(tmp_path)


def test_only_what_is_missing_is_installed_and_only_once(host, monkeypatch):
    """Packages of the environment stay as they are; a list that is met starts no installer."""
    assert host.packages.add(host.session, host.store) == ""
    assert not host.packages.folder.exists()
    assert host.add("cloudpickle", "apple==1.0") == "apple 1.0"
    assert host.add("jax", "apple", "pear") == "pear 1.0"
    assert {path.stem for path in host.packages.folder.glob("*.py")} == {"apple", "pear"}
    monkeypatch.setattr(bootstrap, "run", None)
    assert host.add("cloudpickle", "apple==1.0") == ""


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["apple==2.0"], "needs apple 2.0, and the hosts of its session have apple 1.0"),
        (["quince"], r"(?s)lacks were not installed: .*cannot be installed.*quince was not found"),
    ],
)
def test_what_cannot_be_installed_fails_one_call(host, lines, error):
    """The error has both versions, or the last lines of the installer; the next call goes on."""
    host.add("apple==1.0")
    with pytest.raises(SetupFailed, match=error):
        host.add(*lines)
    assert host.add("apple", "pear") == "pear 1.0"


def import_pear():
    import pear

    run = [sys.executable, "-c", "import pear; print(pear.__file__)"]
    assert subprocess.check_output(run, text=True).strip() == pear.__file__
    return os.getpid(), Path(pear.__file__).parent.name


def has_pear():
    return "pear" in sys.modules


@pytest.fixture
def required(home, index, monkeypatch):
    """Lines of the requirements of all calls, which go to a cluster whose pods have an index."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = ["cloudpickle", "jax==0.10"]

    def install(draft, settings, project):
        data = "".join(f"{line}\n" for line in lines).encode()
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        return replace(draft, requirements=blob), {blob.digest: data}

    monkeypatch.setattr(planning, "_with_installation", install)
    with FakeCluster([CPU_POOL, V6E_4X4], environ=index) as cluster:
        for name, value in settings_of(cluster, home).items():
            monkeypatch.setenv(name, value)
        yield lines
        cluster.wait_for(lambda: not cluster.left_over())


@pytest.mark.long
@pytest.mark.double
@pytest.mark.settles_within(90)
def test_the_hosts_of_a_session_install_what_its_calls_add(required, capsys):
    """Plain and kept calls import a package that the project requires since the session began, and
    later plain calls begin with it; a version that the session excludes is refused before anything
    is submitted."""
    run = kinetic.run("tpu-v6e-16", keep=True)(import_pear)
    session = kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m")
    with session:
        with pytest.raises(ModuleNotFoundError):
            run()
        required[:] = ["cloudpickle", "pear==1.0"]
        first, second = run(), run()
        plain = run.with_options(keep=False)()
        wait_until(kinetic.run("tpu-v6e-16")(has_pear), "pear is not imported ahead")
        required[:] = ["cloudpickle", "jax==0.1"]
        with pytest.raises(PreflightError, match=r"requires jax==0.1, but .* installed jax==0.10"):
            run()
    session.stop()
    session.job.cleanup()
    assert first == second
    assert first[0] != plain[0]
    assert first[1] == plain[1] == "packages-0"
    assert capsys.readouterr().err.count("installed for this session: pear 1.0") == 1
