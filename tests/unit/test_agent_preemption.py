"""The files by which a function and its agent tell each other about a preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

import kinetic
from kinetic._core.exits import Exit
from kinetic._core.gang.messages import HostView
from kinetic._core.preemption import VARIABLE
from kinetic._host.agent.preemption import Preemption
from kinetic._host.identity import Identity
from kinetic._in_job.preemption import Preempted, end_function

STOPPED = HostView(stop=True, stop_exit=Exit.STOPPED, stop_reason="host 1: it was asked to end")
CANCELLED = HostView(stop=True, stop_exit=Exit.CANCELLED)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of host 0; this process acts as the host's function."""
    root = tmp_path / "host-0"
    root.mkdir()
    monkeypatch.setenv(VARIABLE, str(root))
    return root


def agent_of(folder: Path, hosts: int = 2, **environ: str) -> Preemption:
    identity = Identity("", "job-1", 0, hosts, "", "", "", str(folder.parent))
    return Preemption(identity, environ)


def test_outside_a_job_nothing_is_taken_away(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not kinetic.preempted()


def test_the_function_learns_of_a_preemption_and_has_the_whole_grace_period(folder):
    agent = agent_of(folder)
    assert not kinetic.preempted()
    assert agent.begin(500.0)
    assert not agent.begin(5.0, ours=True), "it is told once"
    assert kinetic.preempted()
    assert 400.0 < agent.left_s <= 500.0


def test_a_function_that_calls_preempted_is_not_interrupted(folder):
    agent = agent_of(folder)
    agent.begin(5.0)
    assert not agent.function_polls
    assert not agent.saves_together
    kinetic.preempted()
    assert agent.function_polls
    assert agent.saves_together


def test_calling_preempted_without_a_preemption_changes_nothing(folder):
    agent = agent_of(folder)
    kinetic.preempted()
    assert not agent.function_polls
    assert not agent.discards_end
    assert agent.overriding_stop(None) is None
    assert agent.overriding_stop(STOPPED) is STOPPED


def test_one_host_saves_for_itself(folder):
    agent = agent_of(folder, hosts=1)
    kinetic.preempted()
    agent.begin(5.0, ours=True)
    assert agent.function_polls
    assert not agent.saves_together


@pytest.mark.parametrize(("value", "has"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_with_the_service_of_jax_hosts_save_together_too(folder, value, has):
    agent = agent_of(folder, JAX_ENABLE_PREEMPTION_SERVICE=value)
    agent.begin(5.0)
    assert agent.saves_together is has
    assert not agent.function_polls, "the service waits for SIGTERM"


def test_a_function_that_noticed_the_preemption_counts_as_stopped_by_it(folder):
    agent = agent_of(folder)
    agent.begin(5.0)
    kinetic.preempted()
    assert agent.discards_end
    assert agent.overriding_stop(None).stop_exit is Exit.STOPPED
    assert agent.overriding_stop(CANCELLED) is CANCELLED


def test_a_function_that_another_host_has_told_has_ended_because_of_it(folder):
    """Regression: the function ended because another host was preempted, but the function's agent
    did not know it yet. The agent reported "called sys.exit(143)", and the job failed."""
    agent = agent_of(folder)
    with pytest.raises(Preempted):
        end_function()
    assert agent.discards_end
    assert agent.overriding_stop(None).stop_exit is Exit.STOPPED


def test_the_host_that_is_taken_away_counts_as_evicted(folder):
    agent = agent_of(folder)
    agent.begin(5.0, ours=True)
    assert agent.discards_end
    assert agent.overriding_stop(STOPPED).stop_exit is Exit.EVICTED
    assert agent.overriding_stop(CANCELLED) is CANCELLED


def test_a_single_host_that_did_not_look_and_returns_has_returned(folder):
    agent = agent_of(folder, hosts=1)
    agent.begin(5.0, ours=True)
    assert not agent.discards_end


def test_a_host_that_has_no_folder_yet_is_told_nothing(tmp_path):
    agent = agent_of(tmp_path / "host-0")
    assert agent.begin(5.0, ours=True)
    assert agent.left_s <= 5.0
    assert not agent.function_polls


def test_the_exception_for_a_preemption_exits_with_143():
    assert Preempted().code == 143
