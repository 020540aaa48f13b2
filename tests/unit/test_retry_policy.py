"""Retries of a job that needs all of its slices, and the point at which kinetic gives up."""

from __future__ import annotations

from manifest_cases import planned

from kinetic._core.exits import Exit
from kinetic._core.gang.formation import make_gang_spec, make_policy
from kinetic._core.gang.policy import (
    MOST_FAULTS,
    MOST_TAKEN_AWAY,
    AttemptPolicy,
    Form,
    Restart,
    slices_to_end,
)
from kinetic._core.outcome import HostReport, judge
from kinetic._core.plan import Limits

STOPPED = Exit.STOPPED


def ended(*exits, blamed=(0,)):
    reports = [HostReport(host, exit) for host, exit in enumerate(exits)]
    return judge(len(exits), reports, blamed=blamed, reason="why\nmore", now=1.0)


FAILED = ended(Exit.RAISED, STOPPED)
DIES = ended(Exit.SIGNAL, STOPPED)
EVICTED = ended(Exit.EVICTED, STOPPED)
LATE = ended(Exit.TIMEOUT, Exit.TIMEOUT)


def test_whatever_fails_takes_a_retry_of_a_fixed_job():
    machine = AttemptPolicy.make_fixed(2, retries=3)
    for number, outcome in enumerate((FAILED, DIES, LATE), 2):
        assert machine.may_repeat(outcome)
        machine.note_repeat(outcome, (), float(number))
        assert machine.decide(float(number)) is None, "it needs all slices"
        for host in (0, 1):
            machine.note_ready(host)
        assert machine.decide(float(number)) == Form((0, 1))
        assert machine.attempt == number
    assert not machine.may_repeat(FAILED)
    assert machine.attempt == 4


def test_only_the_last_attempt_waits_for_others_to_fail_alike():
    plan = planned("tpu-v6e-16", retries=1)
    policy = make_policy(plan)
    assert make_gang_spec(plan, policy, 10.0).repeats
    policy.note_repeat(FAILED, (), 1.0)
    assert not make_gang_spec(plan, policy, 10.0).repeats


def test_the_limit_that_attempts_share_is_told_as_it_was_given():
    plan = planned("cpu", slices=(1, 2), limits=Limits(timeout_s=6.0))
    first, second = make_policy(plan), make_policy(plan, attempt=2)
    assert make_gang_spec(plan, first, 10.0).timeout == "timeout of 6 s"
    second.count_time(2.0411)
    spec = make_gang_spec(plan, second, 10.0)
    assert (spec.timeout_s, spec.timeout) == (3.9589, "timeout of 6 s, all attempts together")


def test_a_fixed_job_whose_host_is_taken_away_keeps_its_retries():
    machine = AttemptPolicy.make_fixed(1, retries=1)
    for _ in range(MOST_TAKEN_AWAY):
        assert machine.may_repeat(EVICTED)
        machine.note_repeat(EVICTED, (), 0.0)
    assert not machine.may_repeat(EVICTED)
    assert machine.retries_left == 1
    assert not AttemptPolicy.make_fixed(1).may_repeat(EVICTED), "who asks for no retries gets none"


def test_hosts_of_a_fixed_job_that_died_are_started_again_at_once():
    machine = AttemptPolicy.make_fixed(2, retries=1, start_timeout_s=60.0)
    machine.note_repeat(DIES, slices_to_end(DIES, 1), 1.0)
    machine.note_ready(1)
    assert machine.decide(1.0) == Restart((0,))
    assert machine.decide(60.9) is None
    assert "within 60 s (start_timeout)" in machine.decide(61.0).reason


def test_hosts_of_a_fixed_job_that_die_between_two_attempts_are_kinetics_own_fault():
    machine = AttemptPolicy.make_fixed(2, retries=5)
    machine.note_repeat(FAILED, (), 0.0)
    for _ in range(MOST_FAULTS):
        machine.lose_slice(1, "host 0 of slice 1: killed", 0.0)
    assert "retries does not count them" in machine.decide(0.0).reason


def test_hosts_that_gave_no_sign_of_life_are_ended():
    hung = ended(Exit.HANG, STOPPED, STOPPED, Exit.NEVER_JOINED)
    assert slices_to_end(hung, 2) == (0, 1)
    assert slices_to_end(FAILED, 1) == ()
