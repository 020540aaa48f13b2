"""A gang whose leader, host 0, was lost before it could judge: host 0 is to blame."""

from __future__ import annotations

import pytest

from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, RemoteError, Verdict, judge_leaderless


def test_survivors_that_lost_their_leader_are_not_blamed():
    silence = "The coordinator at 10.0.0.1:5000 has not answered for 10 s."
    broken = RemoteError("JaxRuntimeError", "UNAVAILABLE", "", consequence=True)
    reports = [
        HostReport(1, Exit.STOPPED, silence),
        HostReport(2, Exit.SIGNAL, "killed by SIGABRT", signal=6),
        HostReport(3, Exit.RAISED, "JaxRuntimeError", error=broken),
    ]
    outcome = judge_leaderless(4, reports, now=9.0)
    assert (outcome.verdict, outcome.blamed) == (Verdict.FAILED, (0,))
    assert outcome.reason == "host 0 of 4, which led the job, was lost"
    assert outcome.first is not None
    assert outcome.first.exit is Exit.AGENT_LOST
    assert outcome.reports[1].detail == silence


def test_how_host_0_says_that_it_failed_is_how_it_failed():
    own = HostReport(
        0, Exit.RAISED, "ValueError: mine", error=RemoteError("ValueError", "mine", "")
    )
    outcome = judge_leaderless(2, [own, HostReport(1, Exit.STOPPED)], now=9.0)
    assert (outcome.blamed, outcome.reports[0]) == ((0,), own)
    assert "ValueError: mine" in outcome.reason


def test_a_leader_that_returned_and_was_lost_before_the_others_ended_is_to_blame():
    own = HostReport(0, Exit.RETURNED, result_digest="00")
    outcome = judge_leaderless(2, [own, HostReport(1, Exit.STOPPED)], now=9.0)
    assert (outcome.verdict, outcome.blamed) == (Verdict.FAILED, (0,))
    assert outcome.reports[0].exit is Exit.AGENT_LOST


def test_hosts_that_have_all_returned_have_succeeded():
    reports = [HostReport(0, Exit.RETURNED, result_digest="00"), HostReport(1, Exit.RETURNED)]
    assert judge_leaderless(2, reports, now=9.0).ok


def test_a_gang_that_never_ran_ended_as_the_backend_says():
    backend_reports = [
        HostReport(0, Exit.NEVER_JOINED),
        HostReport(1, Exit.NEVER_JOINED, "it has no node"),
    ]
    outcome = judge_leaderless(
        2, [], backend_reports=backend_reports, reason="no node pool has 4x4", now=9.0
    )
    assert (outcome.verdict, outcome.reason) == (Verdict.FAILED, "no node pool has 4x4")
    assert [r.exit for r in outcome.reports] == [Exit.NEVER_JOINED, Exit.NEVER_JOINED]


def test_hosts_of_which_the_backend_says_nothing_never_joined_when_none_did():
    backend_reports = [HostReport(1, Exit.NEVER_JOINED, "it has no node")]
    outcome = judge_leaderless(
        4, [], backend_reports=backend_reports, reason="no node pool has 4x4", now=9.0
    )
    assert (outcome.verdict, outcome.blamed) == (Verdict.FAILED, (1,))
    assert {r.exit for r in outcome.reports} == {Exit.NEVER_JOINED}
    assert [r.detail for r in outcome.reports] == ["", "it has no node", "", ""]


def test_a_host_that_can_never_start_is_to_blame_and_not_those_that_wait_for_it():
    backend_reports = [HostReport(host, Exit.AGENT_LOST) for host in (0, 1)]
    backend_reports.append(HostReport(2, Exit.SETUP_FAILED, "The image x cannot be pulled."))
    outcome = judge_leaderless(3, [], backend_reports=backend_reports, reason="no image", now=9.0)
    assert (outcome.blamed, outcome.reason) == ((2,), "no image")
    assert [r.exit for r in outcome.reports] == [Exit.STOPPED, Exit.STOPPED, Exit.SETUP_FAILED]


@pytest.mark.parametrize("hosts", [(), (1,), (0, 1)])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("end", [Exit.STOPPED, Exit.REFORMED])
def test_a_gang_that_was_cancelled_is_cancelled(hosts, head, end):
    backend_reports = [HostReport(host, Exit.CANCELLED) for host in range(2)]
    stopped = [HostReport(host, end) for host in hosts]
    outcome = judge_leaderless(
        2,
        stopped,
        backend_reports=backend_reports,
        reason="The job was cancelled.",
        head=head,
        now=9.0,
    )
    assert (outcome.verdict, outcome.reason) == (Verdict.CANCELLED, "The job was cancelled.")


def test_what_the_backend_says_of_host_0_is_told():
    backend_reports = [
        HostReport(0, Exit.AGENT_LOST, "its pod was evicted"),
        HostReport(1, Exit.AGENT_LOST),
    ]
    outcome = judge_leaderless(
        2, [HostReport(1, Exit.STOPPED, "mine")], backend_reports=backend_reports, now=9.0
    )
    assert outcome.reason == "host 0 of 2, which led the job, was lost: its pod was evicted"
    assert outcome.reports[1].detail == "mine"


def test_of_a_gang_that_was_never_led_the_host_that_the_backend_names_is_to_blame():
    backend_reports = [HostReport(1, Exit.AGENT_LOST, "its pod was killed")]
    for led, blamed in ((False, (1,)), (True, (0,))):
        outcome = judge_leaderless(
            2, [], backend_reports=backend_reports, reason="its pod failed", led=led, now=9.0
        )
        assert outcome.blamed == blamed
        assert not outcome.ok


def test_a_head_that_is_lost_is_to_blame_and_no_host():
    stopped = [HostReport(h, Exit.STOPPED, "The coordinator does not answer.") for h in range(2)]
    outcome = judge_leaderless(4, stopped, head=True, reason="its pod was evicted", now=9.0)
    assert outcome.given_up == "the head, which led the job, was lost: its pod was evicted"
    assert outcome.first.exit is Exit.AGENT_LOST
    assert outcome.reports[1] == stopped[1]


def test_without_its_head_a_job_whose_function_has_raised_ends_with_the_exception():
    raised = HostReport(0, Exit.RAISED, "on purpose")
    outcome = judge_leaderless(4, [raised], head=True, now=9.0)
    assert (outcome.first, outcome.given_up) == (raised, "")
