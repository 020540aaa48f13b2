"""The findings of `kinetic doctor` about machines, settings, and leftovers in stores."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic._backends.local import launcher
from kinetic._client.doctor import examination, leftovers, probes
from kinetic._client.doctor.leftovers import Process
from kinetic._client.doctor.probes import Machine, StoreFolder
from kinetic._compile.topologies import WITHOUT_LIBTPU, TpuCompiler
from kinetic._config import settings
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.findings import Finding, Level
from kinetic._core.outcome import HostReport
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.local import LocalStore
from kinetic._system import machine as room
from kinetic.cli.root import call
from kinetic.errors import PreflightError

GIB = 1 << 30
MACHINE = Machine(
    "linux",
    (3, 11, 7),
    {"kinetic": "0.1.0", "jax": "0.7.1", "keras": "3.11"},
    16 * GIB,
    True,
    2,
)
MAC = replace(MACHINE, system="darwin", namespaces=None)
LIBTPU = TpuCompiler("0.10.2", "0.0.52", "/site-packages/libtpu/libtpu.so")
NO_LIBTPU = PreflightError(WITHOUT_LIBTPU)
SLICES = {"tpu-v6e-8": 2, "tpu-v6e-16": 4, "tpu-v6e-256": 64, "tpu-v5p-12288": 3072}


def levels(*findings: Finding) -> list[str]:
    return [str(f.level) for f in findings]


@pytest.mark.parametrize(
    ("machine", "compiler", "level", "words"),
    [
        (MACHINE, NO_LIBTPU, "ok", "pip install 'jax>=0.10' libtpu"),
        (MACHINE, PreflightError("/tpu/python has no compiler"), "warn", "/tpu/python has no"),
        (MAC, NO_LIBTPU, "ok", "docker run --platform linux/amd64"),
        (replace(MACHINE, arch="aarch64"), LIBTPU, "ok", "only on Linux on x86-64"),
        (
            MACHINE,
            LIBTPU,
            "ok",
            "jaxlib 0.10.2, libtpu 0.0.52 compile for TPUs on this machine, with JAX 0.7",
        ),
    ],
)
def test_whether_the_compiler_of_tpus_runs_here(
    machine: Machine, compiler: TpuCompiler | PreflightError, level: str, words: str
) -> None:
    def find() -> TpuCompiler:
        if isinstance(compiler, PreflightError):
            raise compiler
        return compiler

    finding = probes.tpu_compiler(machine, find)
    assert (str(finding.level), words in finding.detail) == (level, True)


# -- findings from facts ---------------------------------------------------------------------------


def test_a_machine_in_order() -> None:
    assert set(
        levels(
            *probes.versions(MACHINE, has_cluster=False),
            probes.memory(MACHINE, SLICES),
            probes.namespaces(MACHINE),
            probes.loopback(MACHINE),
        )
    ) == {"ok"}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (replace(MACHINE, python=(3, 10, 4)), ["problem", "ok", "ok"]),
        (MAC, ["ok", "problem", "ok", "ok"]),
        (replace(MAC, versions={}), ["ok", "problem", "ok", "ok"]),
        (replace(MACHINE, versions={}), ["ok", "warn", "ok"]),
        (replace(MACHINE, versions={"jax": "0.5.3"}), ["ok", "warn", "ok"]),
        (replace(MACHINE, versions={"jax": "0.10.dev1"}), ["ok", "ok", "ok"]),
        (replace(MACHINE, versions={"jax": "1.0"}), ["ok", "ok", "ok"]),
    ],
)
def test_versions(machine: Machine, expected: list[str]) -> None:
    assert levels(*probes.versions(machine, has_cluster=False)) == expected


def test_a_mac_with_a_cluster_is_in_order() -> None:
    findings = probes.versions(MAC, has_cluster=True)
    assert levels(*findings) == ["ok"] * 4
    assert "This is macOS" in findings[1].detail


@pytest.mark.parametrize(
    ("available", "level", "words"),
    [
        (None, "ok", "unknown"),
        (0, "problem", "too little"),
        (GIB // 2, "warn", "enough only for slices of up to 3 hosts"),
        (300 << 20, "warn", "enough only for slices of up to 1 host."),
        (GIB, "ok", "up to 7 hosts, for example tpu-v6e-16 (4 hosts)"),
        (16 * GIB, "ok", "every slice that the processors run well"),
    ],
)
def test_memory_says_which_slices_fit(available: int | None, level: str, words: str) -> None:
    finding = probes.memory(replace(MACHINE, available_bytes=available), SLICES)
    assert finding.level == level
    assert words in finding.detail


@pytest.mark.parametrize(
    ("cpus", "words"),
    [
        (None, "unknown"),
        (
            1,
            "1 processor: good for slices of up to about 8 hosts, for example tpu-v6e-16 (4 hosts)",
        ),
        (2, "up to about 16 hosts, for example tpu-v6e-16 (4 hosts)"),
        (16, "up to about 128 hosts, for example tpu-v6e-256 (64 hosts)"),
    ],
)
def test_processors_say_which_slices_are_sensible(cpus: int | None, words: str) -> None:
    finding = probes.processors(replace(MACHINE, cpus=cpus), SLICES)
    assert finding.level == "ok"
    assert words in finding.detail


@pytest.mark.parametrize(
    ("quota", "most"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_a_quota_leaves_fewer_processors(tmp_path: Path, quota: str, most: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    own = len(os.sched_getaffinity(0))
    assert room.usable_cpus(tmp_path / "cpu.max") == (own if most is None else min(own, most))
    assert room.usable_cpus(tmp_path / "absent") == own


def test_namespaces() -> None:
    assert probes.namespaces(replace(MACHINE, namespaces=None)).level == "ok"
    assert probes.namespaces(replace(MACHINE, namespaces=False)).level == "warn"


def test_a_machine_whose_programs_cannot_talk_to_each_other() -> None:
    finding = probes.loopback(replace(MACHINE, loopback_fault="Network is unreachable"))
    assert finding.level == "problem"
    assert "ip link set lo up" in finding.remedy


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        (StoreFolder("/s", free_bytes=9 * GIB), ["ok", "ok"]),
        (StoreFolder("/s", exists=False, mode=0), ["ok"]),
        (StoreFolder("/s", is_folder=False), ["problem"]),
        (StoreFolder("/s", is_mine=False), ["problem"]),
        (StoreFolder("/s", refused="Others can write there. Run: chmod 700 /s"), ["problem"]),
        (StoreFolder("/s", writable=False), ["problem"]),
        (StoreFolder("/s", exists=False, writable=False), ["problem"]),
        (StoreFolder("/s", mode=0o755), ["ok", "warn"]),
        (StoreFolder("/s", free_bytes=GIB // 2), ["ok", "warn"]),
        (StoreFolder("/s", free_bytes=1 << 20), ["ok", "problem"]),
    ],
)
def test_the_store(folder: StoreFolder, expected: list[str]) -> None:
    findings = probes.store(folder)
    assert levels(*findings) == expected
    assert all(f.remedy for f in findings if f.level is not Level.OK)


def test_a_folder_beside_the_store_of_the_settings_is_not_called_the_store() -> None:
    (finding,) = probes.store(StoreFolder("/s"), "ray+http://head:8265")
    assert finding.check == "local store"
    assert finding.detail.endswith("the configured store is ray+http://head:8265.")


def test_a_store_of_somebody_else_is_not_made_yours() -> None:
    (finding,) = probes.store(StoreFolder("/s", is_mine=False))
    assert finding.remedy == "Set KINETIC_STORE to a folder of your own."


# -- leftovers -------------------------------------------------------------------------------------


NOW = 2_000_000_000.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return LocalStore(tmp_path / "store")


def job(
    store: LocalStore, job_id: str, *, with_files: bool = True, age_s: float = 3600.0
) -> JobRef:
    ref = JobRef(job_id, Place("local", "gke"), "cpu", "f", "f", NOW - age_s, store.uri)
    store.put(layout.JobKeys(job_id).ref, json.dumps(ref.to_json()).encode())
    local = store.path(f"{layout.JobKeys(job_id).prefix}/local")
    (local / "work" / "host-0").mkdir(parents=True)
    for name in ("lock", "socket", "supervisor.json") if with_files else ():
        (local / name).touch()
    for path in (local / "work", *local.iterdir()):
        os.utime(path, (NOW - age_s, NOW - age_s))
    return ref


def probe(store: LocalStore, *processes: Process) -> dict[str, Finding]:
    return {f.check: f for f in leftovers.probe(store, NOW, lambda: iter(processes))}


def test_a_store_in_order(store: LocalStore) -> None:
    assert probe(store)["leftovers"].detail == "None: 0 jobs on this machine, all in order."


def test_a_submission_that_was_killed_before_its_reference(store: LocalStore) -> None:
    for job_id, age_s in (("job-00000001", 90.0), ("job-00000002", 9.0)):
        store.put(layout.JobKeys(job_id).plan, b"{}")
        os.utime(store.path(layout.JobKeys(job_id).prefix), (NOW - age_s, NOW - age_s))
    finding = probe(store)["leftovers"]
    assert finding.detail == "1 submission ended before the job began: job-00000001."
    assert "kinetic jobs prune" in finding.remedy


def test_a_job_whose_supervisor_was_killed_is_judged_by_whoever_asks_for_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = job(store, "job-00000001")
    report = HostReport(0, Exit.RAISED, detail="no")
    store.put(layout.HostKeys(ref.job_id, 1, 0).report, json.dumps(report.to_json()).encode())
    store.put(layout.JobKeys("job-00000002").ref, b"garbage")
    stray = Process(7, "agent 0", ref.job_id, 900.0)
    others = (Process(8, "agent 1", ref.job_id, 1.0), Process(9, "agent 0", "job-9", 900.0))
    findings = probe(store, stray, *others)
    assert {check: str(f.level) for check, f in findings.items()} == {
        "records": "warn",
        "orphans": "warn",
        "processes": "problem",
    }
    assert "job-00000002.json cannot be read" in findings["records"].detail
    assert findings["processes"].remedy == "kill -9 7"
    store.delete(layout.JobKeys("job-00000002").ref)
    monkeypatch.setenv("KINETIC_STORE", store.uri)
    call(["jobs", "wait", ref.job_id])
    assert store.has(layout.JobKeys(ref.job_id).outcome)
    assert [*probe(store)] == ["leftovers"]


@pytest.mark.starts_processes
def test_a_job_that_runs_or_begins_is_left_alone(store: LocalStore) -> None:
    job(store, "job-00000001", age_s=5.0)
    lock = store.path("jobs/job-00000002/local/lock")
    job(store, "job-00000002")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # A process does not see the locks that it holds itself.
        import fcntl

        descriptor = os.open(lock, os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reader, 1) == b"x"
        agents = (Process(n, "agent 0", f"job-0000000{n}", 900.0) for n in (1, 2))
        assert probe(store, *agents)["leftovers"].level == "ok"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.starts_processes
def test_a_shell_that_exports_the_id_of_a_job_is_no_leftover_of_it() -> None:
    by_hand = {"KINETIC_JOB_ID": "job-00000001"}
    environs = (by_hand, by_hand | {"KINETIC_PREEMPTION": "/gone"})
    pids = [os.posix_spawnp("sleep", ["sleep", "60"], each) for each in environs]
    try:
        listed = {process.pid for process in leftovers._list_processes()}
        assert [pid in listed for pid in pids] == [False, True]
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_folder_is_looked_at_before_it_exists(tmp_path: Path) -> None:
    folder = probes.read_folder(tmp_path / "a" / "b")
    assert folder.free_bytes
    assert folder == StoreFolder(
        str(tmp_path / "a" / "b"), exists=False, mode=0, free_bytes=folder.free_bytes
    )
    (tmp_path / "file").touch()
    assert not probes.read_folder(tmp_path / "file" / "x").writable
    assert not probes.read_folder(tmp_path / "file").is_folder


@pytest.mark.starts_processes
def test_the_zygote_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.try_out((), settings.worker_environ()) == ""
    assert "ended with code 1" in launcher.try_out(
        (), settings.worker_environ() | {"PYTHONHOME": "/no/such/folder"}
    )
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert "No such file" in launcher.try_out((), settings.worker_environ())


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor find a healthy machine, and start no zygote (a process that forks jobs)."""
    monkeypatch.setenv("KINETIC_PRELOAD", "off")
    monkeypatch.setattr(probes, "read_machine", lambda: MACHINE)


@pytest.mark.usefixtures("quick")
def test_the_command(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert call(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok ") == len(out.splitlines()) - 1
    assert call(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert {f["check"] for f in document["findings"]} >= {
        "python",
        "jax",
        "processors",
        "memory",
        "store",
        "settings",
        "zygote",
    }


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("columns", [60, 100])
def test_on_a_terminal_a_finding_is_a_row_whose_words_are_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    assert call(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call(["doctor"]) == 0
    head, *lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert head.split() == ["CHECK", "RESULT"]
    assert max(map(len, lines)) <= columns
    rows = [line.split()[:2] for line in lines if not line.startswith(" ")]
    assert rows == [[each["level"], each["check"]] for each in findings]
    memory = next(each["detail"] for each in findings if each["check"] == "memory")
    assert memory.split()[-1] in " ".join(lines), "nothing is cut"


@pytest.mark.usefixtures("quick")
def test_the_folder_that_a_profile_names_is_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "team"
    assert call(["profile", "create", "team", "--store", f"file://{elsewhere}"]) == 0
    capsys.readouterr()
    assert call(["doctor", "--json"]) == 0
    by_check = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert by_check["store"]["detail"].startswith(str(elsewhere))


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_with_settings_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = settings.profiles_file()
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{")
    assert call(["doctor", "--json"]) == 1
    by_check = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert (by_check["profiles"]["level"], by_check["store"]["level"]) == ("problem", "ok")
    file.unlink()
    monkeypatch.setenv("KINETIC_GRACE_S", "soon")
    assert call(["doctor"]) == 1
    assert "KINETIC_GRACE_S" in capsys.readouterr().out
    monkeypatch.delenv("KINETIC_GRACE_S")
    monkeypatch.setenv("KINETIC_PROFILE", "absent")
    assert not examination.examine().ok


@pytest.mark.usefixtures("quick")
def test_a_variable_that_looks_like_one_of_a_setting_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_BACKND", "ray")
    call(["doctor"])
    assert "The environment variable KINETIC_BACKND has no effect" in capsys.readouterr().out
