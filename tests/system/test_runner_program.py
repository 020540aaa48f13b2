"""`python -m kinetic.runner`: hosts without a supervisor, led by host 0 over TCP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from gangs import is_titled, wait_until

from kinetic._backends import stored
from kinetic._client.submission import ref_of
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.options import Options
from kinetic._core.outcome import Outcome
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan
from kinetic._pickling import call, results
from kinetic._pickling.modules import Shipped
from kinetic._rpc import certificate
from kinetic._store.local import LocalStore
from kinetic._system import processes

TOKEN = "a-token-of-the-test"


def devices():
    import jax

    print(f"host {jax.process_index()} speaks")
    return jax.device_count()


def fail_on_host_1():
    if os.environ["KINETIC_HOST_INDEX"] == "1":
        raise ValueError("on purpose")
    time.sleep(1000)


def store_plan(home, func, **options):
    store = LocalStore(home)
    packed = call.pack(func, (), {}, env_vars={}, shipped=Shipped())
    store.put(layout.blob(packed.digest), packed.data)
    plan = Plan(
        job_id=f"job-{os.urandom(4).hex()}",  # unique, as it names a folder in memory
        name=func.__name__,
        place=Place("gke"),
        options=Options(resolve("tpu-v6e-8"), **options),
        payload=Blob(packed.digest, packed.size_bytes),
        versions=packed.versions,
        created_at=0.0,
    )
    store.put(layout.JobKeys(plan.job_id).plan, json.dumps(plan.to_json()).encode())
    return plan


@pytest.fixture
def plan(home):
    return store_plan(home, devices)


class Gang:
    """The hosts of a job, each a runner program, and the TCP port of their leader."""

    def __init__(self, plan: Plan, home: Path) -> None:
        self._plan, self._home = plan, home
        self.port = socket.socket()
        # Reserve the port. The leader, which sets the same option, can still listen on it.
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port.bind(("127.0.0.1", 0))
        self.endpoint = Endpoint(
            f"127.0.0.1:{self.port.getsockname()[1]}", TOKEN, plan.job_id, attempt=1
        )
        pair = certificate.make(self.endpoint.tls_name)
        self.endpoint = replace(self.endpoint, certificate=pair.certificate)
        self._secrets = home.parent / "secrets"
        self._secrets.mkdir(parents=True)
        for name, text in [("token", TOKEN), ("tls.crt", pair.certificate), ("tls.key", pair.key)]:
            (self._secrets / name).write_text(text)

    def start(
        self, host: int, output: IO[bytes] | None = None, closing: str = "", **more: str
    ) -> subprocess.Popen[bytes]:
        variables = {
            "KINETIC_STORE": str(self._home),
            "KINETIC_JOB_ID": self._plan.job_id,
            "KINETIC_HOST_INDEX": str(host),
            "KINETIC_HOSTS": str(self._plan.hosts),
            "KINETIC_COORDINATOR": self.endpoint.target,
            "KINETIC_CREDENTIALS": str(self._secrets),
            "KINETIC_SCRATCH": str(self._home.parent / f"scratch-{host}"),
            "KINETIC_SIMULATED": "1",
        }
        env = dict(os.environ) | variables | more
        if "KINETIC_TOKEN" in more:
            del env["KINETIC_HOST_INDEX"], env["KINETIC_CREDENTIALS"]
        command = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-m", "kinetic.runner"]
        return subprocess.Popen(command, env=env, stdout=output, stderr=output)

    def run(self) -> list[int]:
        with self.port:
            hosts = [self.start(host) for host in range(self._plan.hosts)]
            return [host.wait() for host in hosts]

    def run_as_pods(self) -> list[int]:
        """Run the hosts as a cluster does: from one template, each at its own address."""
        secrets = [(self._secrets / name).read_text() for name in ("token", "tls.crt", "tls.key")]
        names = ("KINETIC_TOKEN", "KINETIC_TLS_CERTIFICATE", "KINETIC_TLS_KEY")
        template = dict(zip(names, secrets, strict=True)) | {
            "KINETIC_COORDINATOR": f"127.77.0.1:{self.port.getsockname()[1]}",
            "KINETIC_JOB_INDEX": "0",
            "KINETIC_HOSTS_PER_SLICE": str(self._plan.hosts),
        }
        own = [
            {"KINETIC_POD_INDEX": str(host), "KINETIC_HOST_ADDRESS": f"127.77.0.{host + 1}"}
            for host in range(self._plan.hosts)
        ]
        with self.port:
            hosts = [
                self.start(host, **template, **variables) for host, variables in enumerate(own)
            ]
            return [host.wait() for host in hosts]


def outcome_of(plan: Plan, home: Path) -> Outcome:
    return Outcome.from_json(json.loads(LocalStore(home).get(layout.JobKeys(plan.job_id).outcome)))


def test_hosts_of_their_own_form_a_gang(plan, home):
    assert Gang(plan, home).run() == [0, 0]
    outcome = outcome_of(plan, home)
    assert [report.exit for report in outcome.reports] == [Exit.RETURNED] * 2
    assert outcome.ok
    store = LocalStore(home)
    assert results.unpack_value(store.get(layout.HostKeys(plan.job_id, 1, 0).result)) == 8
    assert [store.get(layout.HostKeys(plan.job_id, 1, i).log) for i in (0, 1)] == [
        b"host 0 speaks\n",
        b"host 1 speaks\n",
    ]


def test_hosts_of_one_template_form_a_gang(plan, home):
    assert Gang(plan, home).run_as_pods() == [0, 0]
    assert outcome_of(plan, home).ok


@pytest.mark.long
def test_pods_that_have_finished_and_are_started_again_run_nothing(plan, home):
    """A node that was restarted starts finished pods again, as it had not reported their end. They
    run nothing, and the outcome stays."""
    gang = Gang(plan, home)
    port = gang.port.dup()
    assert gang.run_as_pods() == [0, 0]
    before, store = outcome_of(plan, home), LocalStore(home)
    gang.port = port
    assert gang.run_as_pods() == [ProgramCode.DELIVERED] * 2
    assert outcome_of(plan, home) == before
    assert store.get(layout.HostKeys(plan.job_id, 1, 0).log) == b"host 0 speaks\n"
    assert sorted(store.parts(f"jobs/{plan.job_id}/attempts")) == ["1"]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_host_whose_code_failed_says_so_once_the_leader_has_judged(home, retries):
    plan = store_plan(home, fail_on_host_1, retries=retries)
    assert Gang(plan, home).run() == [ProgramCode.DELIVERED, ProgramCode.CODE_FAILED]
    outcome = outcome_of(plan, home)
    assert (outcome.attempt, outcome.blamed) == (retries + 1, (1,)), outcome.reason


def test_the_leaders_own_failure_is_its_exit_code(home):
    plan = store_plan(home, "none".index)
    assert Gang(plan, home).run()[0] == ProgramCode.CODE_FAILED


def start_with_output(
    gang: Gang, host: int, path: Path, closing: str = ""
) -> subprocess.Popen[bytes]:
    """Start a host that repeats its output to a file; `closing` closes some of its streams."""
    with open(path, "wb") as output:
        return gang.start(host, output, closing, KINETIC_TEE="1")


@pytest.mark.parametrize("closing", ["", ">&-", ">&- 2>&- <&-"])
def test_output_is_also_what_the_program_prints(plan, home, closing):
    gang, paths = Gang(plan, home), [home.parent / f"output-{host}" for host in (0, 1)]
    with gang.port:
        hosts = [start_with_output(gang, host, path, closing) for host, path in enumerate(paths)]
        assert [host.wait() for host in hosts] == [0, 0], outcome_of(plan, home).reason
    lines = [b"host 0 speaks\n", b"host 1 speaks\n"]
    assert [LocalStore(home).get(layout.HostKeys(plan.job_id, 1, i).log) for i in (0, 1)] == lines
    assert [path.read_bytes() for path in paths] == ([b"", b""] if closing else lines)


def test_a_host_that_is_not_told_who_it_is_says_so():
    env = {name: value for name, value in os.environ.items() if not name.startswith("KINETIC_")}
    done = subprocess.run(
        [sys.executable, "-m", "kinetic.runner"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "KINETIC_HOST_INDEX is not set" in done.stderr


def test_a_pod_that_is_ended_while_it_waits_for_its_leader_ends(plan, home):
    """SIGTERM comes early, while the pod's bootstrap still blocks signals, and no leader answers.
    The pod must end."""
    gang = Gang(plan, home)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        # A restarted pod asks the leader for its attempt; no leader answers here.
        pod = gang.start(1, KINETIC_POD_INDEX="1", KINETIC_RESTARTS="1")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with gang.port:
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(timeout=100) == 143


def hold():
    time.sleep(1000)


def has_agents(plan):
    titles = [f"kinetic-agent {plan.job_id} host {host}" for host in range(plan.hosts)]
    return any(is_titled(pid, title) for pid in processes.all_pids() for title in titles)


def test_a_restarted_pod_waits_for_the_leader_of_its_own_start(home, tmp_path):
    """A pod restarts while the leader of the previous restart still ends at the same address. The
    pod must wait for the new leader: the old one would send it away as finished."""
    plan = store_plan(home, devices, retries=1)
    gang = Gang(plan, home)
    output_file = tmp_path / "host-1"
    with output_file.open("wb") as output, gang.port:
        old = gang.start(0, KINETIC_POD_INDEX="0", KINETIC_RESTARTS="0")
        new = gang.start(1, output, KINETIC_POD_INDEX="1", KINETIC_RESTARTS="1")
        refused = "the leader belongs to restart 0, but the host to restart 1"
        wait_until(lambda: refused in output_file.read_text(), "it does not wait")
        # gRPC's threads hold locks, which agents that are forked beside them would wait for.
        assert len(os.listdir(f"/proc/{new.pid}/task")) == 1
        old.kill()
        old.wait()
        own = str(tmp_path / "another-pod")
        leader = gang.start(0, KINETIC_POD_INDEX="0", KINETIC_RESTARTS="1", KINETIC_SCRATCH=own)
        codes = [leader.wait(), new.wait()]
    assert codes == [0, 0], outcome_of(plan, home)
    assert outcome_of(plan, home).ok


def test_killed_programs_leave_neither_agents_nor_folders(home):
    """All programs of a job are killed: their agents end, and their scratch folders are removed."""
    plan = store_plan(home, hold)
    gang, store = Gang(plan, home), LocalStore(home)
    with gang.port:
        hosts = [gang.start(host) for host in range(plan.hosts)]
        wait_until(lambda: stored.has_begun(store, ref_of(plan, store.uri)), "it does not begin")
        for host in hosts:
            host.kill()
            host.wait()
    wait_until(lambda: not has_agents(plan), "an agent is left")
    assert not list(home.parent.glob("scratch-*/*"))


def test_a_head_needs_no_folder(plan, home):
    """A head, which leads a job and runs no host, creates no scratch folder."""
    gang = Gang(plan, home)
    with gang.port:
        head = gang.start(0, KINETIC_ROLE="head")
        wait_until(lambda: is_titled(head.pid, f"kinetic-host {plan.job_id} head"), "no head")
        assert not list(home.parent.glob("scratch-*/*"))
        head.kill()
        head.wait()
