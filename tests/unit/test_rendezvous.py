"""Hosts of a gang wait for each other twice: for all workers to start, and for all processes to
join one JAX world. Hosts that do not come are named."""

from __future__ import annotations

import pytest

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, Gang, GangSpec, Heartbeat
from kinetic._core.outcome import HostReport

STACK = 'Current thread 0x1 (most recent call first):\n  File "/x/train.py", line 3 in f\n'


class Running:
    """A gang whose hosts have all joined, with a fake clock."""

    def __init__(self, hosts: int = 3, start_timeout_s: float = 10.0) -> None:
        self.now = 0.0
        self.gang = Gang(GangSpec(hosts, start_timeout_s=start_timeout_s), self.now)
        for host in range(hosts):
            self.gang.join(host, f"start-{host}", "127.0.0.1", self.now)
        self.states = ["starting"] * hosts
        self.silent: set[int] = set()

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for host, state in enumerate(self.states):
                self.gang.heartbeat(Heartbeat(host, Activity(state)), self.now)
            request = self.gang.view(0).stacks_request
            for host in range(len(self.states)):
                if request and host not in self.silent:
                    self.gang.stacks(host, request, STACK, self.now)
            self.gang.sweep(self.now)

    def report(self, host: int, *, joined_jax: bool) -> None:
        self.states[host] = "returned"
        self.gang.report(HostReport(host, Exit.RETURNED, joined_jax=joined_jax), self.now)


def test_workers_that_do_not_start_in_time_are_named() -> None:
    gang = Running()
    gang.states = ["running", "starting", "running"]
    gang.pass_time(9)
    assert gang.gang.stop_reason == ""
    gang.pass_time(4)
    assert gang.gang.first_failure == (1,)
    assert gang.gang.stop_reason == "host 1 of 3 was not ready within 10 s (start_timeout)"
    assert gang.gang.view(1).stop_exit is Exit.NEVER_JOINED
    assert gang.gang.view(0).stop_exit is Exit.STOPPED


def test_of_workers_that_all_wait_the_one_that_does_not_answer_is_to_blame() -> None:
    gang = Running()
    gang.silent = {2}
    gang.pass_time(14)
    assert gang.gang.first_failure == (2,)


@pytest.mark.parametrize("state", ["running", "debugging", "held", "waiting"])
def test_start_timeout_does_not_stop_hosts_that_run_or_wait_for_a_debugger(state: str) -> None:
    gang = Running()
    gang.states = [state] * 3
    gang.pass_time(100)
    assert gang.gang.stop_reason == ""


def test_a_worker_that_starts_while_its_stacks_are_asked_for_is_let_go() -> None:
    gang = Running()
    gang.silent = {0}
    gang.pass_time(10)
    gang.states = ["running"] * 3
    gang.pass_time(20)
    assert gang.gang.stop_reason == ""


def test_a_wait_for_a_host_that_has_returned_without_jax_ends_at_once() -> None:
    gang = Running()
    gang.states = ["joining", "running", "running"]
    gang.pass_time(2)
    gang.report(1, joined_jax=False)
    gang.pass_time(3)
    assert gang.gang.stop_reason.startswith(
        "host 1 of 3 returned without using JAX, and host 0 waits for it in JAX. "
    )
    assert gang.gang.first_failure == (0,)
    assert gang.gang.view(0).stop_exit is Exit.HANG


def test_hosts_that_were_in_the_world_may_return_while_others_still_join() -> None:
    gang = Running()
    gang.states = ["joining", "running", "running"]
    gang.report(1, joined_jax=True)
    gang.pass_time(9)
    gang.states[0] = "running"
    gang.pass_time(30)
    assert gang.gang.stop_reason == ""


def test_a_wait_in_jax_has_a_limit_that_begins_with_the_first_who_waits() -> None:
    gang = Running()
    gang.states = ["running"] * 3
    gang.pass_time(100)
    gang.states = ["joining", "running", "joining"]
    gang.pass_time(9)
    assert gang.gang.stop_reason == ""
    gang.pass_time(4)
    assert gang.gang.stop_reason.startswith(
        "hosts 0, 2 of 3 have waited 10 s in JAX for host 1, which has not joined (start_"
    )
    assert gang.gang.first_failure == (1,)
    assert gang.gang.view(1).stop_exit is Exit.HANG
    assert gang.gang.view(0).stop_exit is Exit.STOPPED


def test_each_wait_in_jax_has_the_whole_time() -> None:
    gang = Running()
    for _ in range(5):
        gang.states = ["joining", "joining", "running"]
        gang.pass_time(8)
        gang.states = ["running"] * 3
        gang.pass_time(2)
    assert gang.gang.stop_reason == ""


def test_hosts_that_all_wait_in_jax_are_said_to_wait_for_each_other() -> None:
    gang = Running()
    gang.states = ["joining"] * 3
    gang.pass_time(14)
    assert gang.gang.stop_reason.startswith(
        "hosts 0-2 of 3 have waited 10 s in JAX for each other (start_timeout=). "
    )
