"""`kill_hosts` and `kinetic jobs kill`: the hosts that get a signal, and the output."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from cli_fakes import Capture, World

from kinetic._client import killing
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic.errors import UsageError


def of(hosts: int, accelerator: str, place: Place = Place("local", "gke")) -> JobRef:  # noqa: B008
    return JobRef("job-00000001", place, accelerator, "f", "f", 0.0, "/store", hosts=hosts)


def of_single(accelerator: str) -> JobRef:
    return replace(of(1, accelerator), has_single_controller=True)


@pytest.mark.parametrize(
    ("ref", "slice_", "host", "hosts"),
    [
        (of(8, "tpu-v6e-16"), 1, None, (4, 5, 6, 7)),
        (of(8, "tpu-v6e-16"), 1, 2, (6,)),
        (of(8, "tpu-v6e-16"), None, 2, (2,)),
        (of(4, "tpu-v6e-16"), 0, None, (0, 1, 2, 3)),
        (of(3, "gpu-h100x2"), 2, None, (2,)),
        (of(1, "cpu"), 0, 0, (0,)),
        (of(2, "xpu-of-tomorrow"), 0, 1, (1,)),
        (of_single("tpu-v6e-16"), 1, None, (5, 6, 7, 8)),
        (of_single("tpu-v6e-16"), 0, 3, (4,)),
        (of_single("tpu-v6e-16"), None, 0, (0,)),
    ],
)
def test_a_host_is_counted_within_its_slice(ref, slice_, host, hosts):
    assert killing.choose_hosts(ref, slice_, host) == hosts


@pytest.mark.parametrize(
    ("ref", "slice_", "host", "says"),
    [
        (of(8, "tpu-v6e-16"), None, None, "To stop the whole job, cancel it"),
        (of(8, "tpu-v6e-16"), 2, None, r"no slice 2: job-00000001 has slices 0 to 1\."),
        (of(8, "tpu-v6e-16"), -1, None, "no slice -1"),
        (of(8, "tpu-v6e-16"), 1, 4, r"no host 4 of slice 1: .* has hosts 0 to 3 of slice 1\."),
        (of(8, "tpu-v6e-16"), None, 8, r"no host 8: .* has hosts 0 to 7\."),
        (of(8, "tpu-v6e-16"), None, True, "no host True"),
        (of(1, "cpu"), 1, None, r"no slice 1: job-00000001 has only slice 0\."),
        (of_single("tpu-v6e-16"), -1, None, "no slice -1: .* counts its slices from 0"),
        (
            of_single("tpu-v6e-16"),
            1,
            4,
            r"no host 4 of slice 1: .* has hosts 0 to 3 of slice 1\.",
        ),
        (of_single("tpu-v6e-16"), None, 1, r"no host 1: .* has only host 0\."),
    ],
)
def test_a_slice_or_host_that_does_not_exist_is_refused(ref, slice_, host, says):
    with pytest.raises(UsageError, match=says):
        killing.choose_hosts(ref, slice_, host)


def test_machines_of_a_single_controller_are_named_by_their_slice():
    assert killing.name_machines(of(8, "tpu-v6e-16"), (4, 5, 6, 7)) == "hosts 4-7"
    assert killing.name_machines(of(8, "tpu-v6e-16"), (4,), of_all=True) == "host 4 of 8"
    assert killing.name_machines(of_single("tpu-v6e-16"), (5, 6, 7, 8)) == "machines 0-3 of slice 1"
    assert killing.name_machines(of_single("tpu-v6e-16"), (4,)) == "machine 3 of slice 0"
    assert killing.name_machines(of_single("tpu-v6e-16"), (0,)) == "host 0"


@pytest.mark.parametrize("name", ["KILL", "sigkill", "9", 9, signal.SIGKILL.value, " Kill "])
def test_signals_have_names_and_numbers(name):
    assert killing.signal_of(name) is signal.SIGKILL


@pytest.mark.parametrize("name", ["", "KLL", "99", 0, -9, "SIG"])
def test_an_unknown_signal_is_refused(name):
    with pytest.raises(UsageError, match="There is no signal"):
        killing.signal_of(name)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path / "store")


@pytest.fixture
def killed(world: World, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def kill(ref, hosts, signum, *, agents=False):
        calls.append((ref.job_id, hosts, signum, agents))
        return tuple(host for host in hosts if host != 2)

    monkeypatch.setattr(world.backend, "kill", kill, raising=False)
    return calls


def test_a_host_is_killed(world: World, killed: list[object], capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    assert world("jobs", "kill", "--yes", "job-0", "--host", "1") == 0
    assert killed == [("job-00000001", (1,), signal.SIGKILL, False)]
    assert capsys.readouterr().out == "SIGKILL was sent to host 1 of job-00000001.\n"


def test_agents_are_signalled_and_told_of_as_json(
    world: World, killed: list[object], capsys: Capture
) -> None:
    world.job("job-00000001", hosts=2)
    command = ("jobs", "kill", "-y", "--json", "--agents", "--signal", "term", "--host", "0")
    assert world(*command, "--last") == 0
    assert killed == [("job-00000001", (0,), signal.SIGTERM, True)]
    expected = {"job_id": "job-00000001", "signal": "SIGTERM", "hosts": [0]}
    assert json.loads(capsys.readouterr().out) == expected


def test_kill_without_yes_sends_nothing_and_says_what_it_would_do(
    world: World, killed: list[object], capsys: Capture
) -> None:
    world.job("job-00000001", hosts=2)
    assert world("jobs", "kill", "--host", "1", "job-0") == 2
    assert killed == []
    err = capsys.readouterr().err
    assert "This would send SIGKILL to host 1 of job-00000001. Add --yes" in err


def test_a_host_on_which_nothing_runs_is_told_of(
    world: World, killed: list[object], capsys: Capture
) -> None:
    world.job("job-00000001", hosts=3)
    assert world("jobs", "kill", "--yes", "--host", "2", "job-0") == 3
    assert (
        "does not run on host 2 of 3 at present: the job is starting or has ended"
        in capsys.readouterr().err
    )


def test_an_ended_job_has_no_hosts(world: World, killed: list[object], capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    world.backend.phases["job-00000001"] = JobStatus.FAILED
    world.succeed("job-00000001")
    assert world("jobs", "kill", "--host", "1", "job-0") == 3
    assert "job-00000001 has ended" in capsys.readouterr().err
    assert killed == []


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--host", "7"], 2), ([], 2), (["--host", "1", "--signal", "HURT"], 2)],
)
def test_a_wrong_line_kills_nothing(world: World, killed: list[object], words, code) -> None:
    world.job("job-00000001", hosts=2)
    assert world("jobs", "kill", "--yes", "job-0", *words) == code
    assert killed == []


def test_a_backend_that_cannot_kill_hosts_is_refused(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    assert world("jobs", "kill", "--yes", "--host", "1", "job-0") == 2
    assert "cannot be killed" in capsys.readouterr().err
