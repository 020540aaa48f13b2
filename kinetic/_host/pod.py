"""The state of a job for a pod that a cluster may have restarted, read from the store.

A cluster restarts pods without saying how earlier pods ended, but the records in the store say so.
A job with a verdict has ended, and its function must never run again. An attempt that has begun and
has no outcome lost its leader.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from functools import partial

from kinetic._core import events, layout
from kinetic._core.exits import ProgramCode
from kinetic._core.gang.formation import make_policy
from kinetic._core.gang.picture import picture_of
from kinetic._core.gang.policy import AttemptPolicy, Failure, too_many
from kinetic._core.outcome import Outcome, Verdict, judge_leaderless, program_code
from kinetic._core.plan import Plan
from kinetic._host import verdicts
from kinetic._host.identity import Identity
from kinetic._host.verdicts import Attempt
from kinetic._store import attempts, files
from kinetic._store.base import Store
from kinetic._system import processes
from kinetic.errors import CoordinatorLost, NotFound

_POLL_S = 0.2


def take_up(plan: Plan, store: Store) -> AttemptPolicy | Attempt:
    """Return the policy with which this leader begins, or goes on after a lost leader. If the job
    does not go on, return its last attempt."""
    number = attempts.find_newest(store, plan.job_id)
    lost = _judge_lost(plan, store, number)
    if lost is not None:
        verdicts.write_verdict(store, plan.job_id, lost)
        if not _may_follow(read_policy(plan, store, number), lost):
            return Attempt(lost)  # The lost leader could not write it.
        verdicts.repeat(store, plan.job_id, lost)
        number += 1
    policy = read_policy(plan, store, number)
    if len(policy.failures) > policy.rules.max_failures:
        ended = Attempt(attempts.read_verdict(store, plan.job_id, number - 1))
        return ended.mark_given_up(too_many(policy.rules, policy.failures))
    if plan.limits.budget_s is not None:
        before = picture_of(_read_events(plan, store), plan.hosts)
        policy.paid_s = before.paid_s(policy.rules.most, time.time())
    return policy


def read_policy(plan: Plan, store: Store, attempt: int) -> AttemptPolicy:
    """Return the policy for a job from this attempt on, given the outcomes of the earlier ones."""
    job_id, retries = plan.job_id, plan.options.retries
    if plan.elastic_gang is None:
        away = attempts.count_taken_away(store, job_id, attempt) if retries else 0
        retries_left = max(retries - (attempt - 1 - away), 0)
        return make_policy(plan, attempt=attempt, retries=retries_left, taken_away=away)
    ended = {number: attempts.read_verdict(store, job_id, number) for number in range(1, attempt)}
    repeated = {number for number, outcome in ended.items() if _has_failed_by_itself(outcome)}
    failures = tuple(
        Failure(number, (), outcome.reason)
        for number, outcome in ended.items()
        if number not in repeated and not verdicts.has_left(outcome)
    )
    retries_left = max(retries - len(repeated), 0)
    return make_policy(plan, attempt=attempt, failures=failures, retries=retries_left)


def _judge_lost(plan: Plan, store: Store, number: int) -> Outcome | None:
    """Return the outcome of an attempt that lost its leader; None if it has not begun."""
    own = [event for event in _read_events(plan, store) if event.attempt == number]
    is_elastic = plan.elastic_gang is not None
    formed = [len(event.hosts) for event in own if event.kind is events.EventKind.FORMED]
    sizes = formed if is_elastic else [plan.hosts for _ in own]
    if not sizes:
        return None
    reports = attempts.read_reports(store, plan.job_id, number, sizes[0])
    return judge_leaderless(sizes[0], reports, head=is_elastic, now=time.time(), attempt=number)


def _may_follow(policy: AttemptPolicy, lost: Outcome) -> bool:
    """True if another attempt may follow one that lost its leader."""
    if policy.is_fixed:
        return policy.may_repeat(lost)
    goes_on = policy.retries_left > 0 or not _has_failed_by_itself(lost)
    return lost.verdict is Verdict.FAILED and goes_on


def _has_failed_by_itself(outcome: Outcome) -> bool:
    """True if the function failed and no slice was lost."""
    return outcome.first is not None and program_code(outcome.first) is ProgramCode.CODE_FAILED


def _read_events(plan: Plan, store: Store) -> list[events.GangEvent]:
    try:
        return events.parse(store.get(layout.JobKeys(plan.job_id).events))
    except NotFound:
        return []


def attempt_of(identity: Identity, plan: Plan, store: Store) -> int:
    """Return the attempt that a pod joins. The number of restarts is not enough: a queue may stop
    and resume all pods without counting a restart.

    Raises:
        CoordinatorLost: host 0 did not come up within the start timeout.
    """
    job_id, retries = plan.job_id, plan.options.retries
    repeats = identity.restarts or (retries and attempts.find_newest(store, job_id) > 1)
    return _ask_in_child(identity, plan.limits.start_timeout_s) if repeats else 1


def _ask_in_child(identity: Identity, start_timeout_s: float) -> int:
    """Return the attempt that host 0 leads. A child asks for it: gRPC starts threads, and agents
    are forked from this process. SIGTERM ends both."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    own_pid, (answers, write_end) = os.getpid(), os.pipe()
    if (child := processes.fork()) == 0:
        processes.die_with_parent(own_pid)
        processes.exit_with(partial(_ask_leader, identity, start_timeout_s, write_end))
    os.close(write_end)
    with open(answers) as file:
        while not select.select([file], [], [], _POLL_S)[0]:
            if signal.SIGTERM in signal.sigpending():
                os._exit(128 + signal.SIGTERM)
        answer = file.read()
    os.waitpid(child, 0)
    if not answer.isdecimal():
        raise CoordinatorLost(answer or "The process that asks the leader has died.")
    return int(answer)


def _ask_leader(identity: Identity, start_timeout_s: float, answers: int) -> int:
    """Ask host 0 for the attempt until it answers: its name resolves to the previous leader until
    that has ended, and the previous leader refuses hosts of a later start. Write the attempt, or
    why there is none, to the descriptor `answers`."""
    from dataclasses import replace

    from kinetic._rpc.client import ControlClient

    give_up_at, reason = time.monotonic() + start_timeout_s, ""
    while True:
        try:
            with ControlClient(replace(identity.endpoint, attempt=0)) as client:
                answer = str(client.snapshot()["attempt"])
                break
        except CoordinatorLost as error:
            answer = str(error)
            if time.monotonic() >= give_up_at:
                break
            if answer != reason:
                reason = answer
                sys.stderr.write(
                    f"kinetic.runner: host {identity.host} waits for its leader: {reason}\n"
                )
                sys.stderr.flush()
    files.write_all(answers, answer.encode())
    return 0
