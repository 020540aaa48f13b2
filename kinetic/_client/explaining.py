"""One page about a job that failed, hangs or waits, from the records that exist.

This module judges nothing: verdicts and reasons come from the board.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kinetic._backends.base import LogRequest
from kinetic._client.board import text
from kinetic._client.board.reader import JobBoard
from kinetic._client.goodput import GoodputReader
from kinetic._client.metrics import RowsReader
from kinetic._core import failure, layout
from kinetic._core.events import EventKind
from kinetic._core.exits import Exit, HostState
from kinetic._core.gang import blame
from kinetic._core.gang.picture import AttemptPicture, GangPicture
from kinetic._core.metrics import DEVICE_LIMIT, DEVICE_MEMORY, MEMORY
from kinetic._core.outcome import Outcome, name_hosts
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.values import dataclass
from kinetic.errors import KineticError, name_some

_MOST_LINES, _MOST_GROUPS, _MOST_ATTEMPTS = 40, 8, 10
_ADVICE = {
    Exit.OUT_OF_MEMORY: "Use a larger machine or memory=, or smaller batches.",
    Exit.EVICTED: "Use retries= and a kinetic.Checkpointer: the job then goes on by itself.",
    Exit.AGENT_LOST: "Use retries= and a kinetic.Checkpointer: the job then goes on by itself.",
    Exit.TIMEOUT: "Set a longer timeout=.",
    Exit.OVER_BUDGET: "Set a larger budget=.",
    Exit.NEVER_JOINED: "Check the cluster: kinetic doctor",
}
_CAUSE_FIRST = "Fix this cause first: a longer timeout= or a larger budget= may only cost more."


@dataclass(frozen=True)
class Explanation:
    """A page about a job. `print` it, or take its facts.

    Attributes:
        sections: The paragraphs of the page by their titles, in reading order.
        facts: The facts as a JSON object.
    """

    sections: Mapping[str, str]
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        parts = []
        for title, words in self.sections.items():
            lines = text.printable_lines(words).splitlines()
            head = f"{title + ':':<10} {lines[0]}" if len(lines) == 1 else f"{title}:"
            parts += [head] if len(lines) == 1 else [head, *(f"  {line}" for line in lines)]
        return "\n".join(parts)


def explain(
    board: JobBoard,
    ref: JobRef,
    *,
    read_tail: Callable[[int, int], str],
    read_stacks: Callable[[], Mapping[int, str]],
    now: float,
) -> Explanation:
    """Return the page that explains why a job failed, hangs or waits.

    Args:
        board: reads the job's records.
        ref: the job.
        read_tail: returns the last lines that a host printed, given its index and the attempt.
        read_stacks: returns the stacks of all hosts.
        now: seconds since the epoch.
    """
    outcome = board.outcome(ref)
    standing = board.read_standing(ref)
    gang = board.gang(ref, outcome)
    attempt, first = gang.current, None if outcome is None else outcome.first
    warnings = attempt.difference, _find_notice(board, ref, attempt.number)
    notice = "" if outcome is not None else warnings[1]
    reason = standing.reason or notice if outcome is None else outcome.reason
    suspects = _find_suspects(attempt, outcome)
    members = _describe_others(attempt, (), reason)
    has_returned = any(member.state is HostState.RETURNED for member in attempt.members)
    is_uneven = outcome is None and not suspects and has_returned and "\n" in members
    goodput = GoodputReader(board, ref)
    goodput.read(gang, standing.ended_at or now)
    cost = board.cost(ref, gang)
    sections = {
        "Job": f"{ref.display_name} ({ref.job_id}) on {ref.accelerator}",
        "State": standing.state,
        "Waits" if standing.state == JobStatus.PENDING else "Cause": reason,
        # The first letter may be a capital in a longer reason.
        "Programs": "" if attempt.difference[1:] in reason else attempt.difference,
    }
    stacks: Mapping[int, str] = {}
    if (
        notice
        or is_uneven
        or (suspects and (outcome is None or any(r.stacks for r in outcome.reports)))
    ):
        with contextlib.suppress(KineticError):
            stacks = read_stacks()
    if suspects:
        host = suspects[0]
        sections["Host"] = _describe_group(attempt, suspects, reason)
        if first is not None and first.error is not None:
            sections["Traceback"] = _take_end(first.error.traceback)
        tail = failure.last_lines(read_tail(host, attempt.number), host)
        sections["Output"] = textwrap.dedent(tail.partition("\n")[2])
        sections["Others"] = _describe_others(attempt, suspects, reason)
    sections["Hosts"] = members if is_uneven else ""
    sections["Stacks"] = _take_end(blame.format_groups(dict(stacks))) if stacks else ""
    sections["Attempts"] = _describe_attempts(gang, goodput)
    sections["Evicted"] = _describe_evictions(gang)
    sections["Memory"] = _describe_memory(board, ref, outcome, suspects[0] if suspects else 0)
    sections["Time"] = goodput.describe()
    if cost is not None and gang.started_at:
        sections["Cost"] = text.describe_cost(*cost, is_over=outcome is not None)
    advice = _list_advice(
        ref,
        standing.state,
        outcome,
        stands=bool(notice or suspects or is_uneven),
        is_explained=any(words and words[1:] in reason for words in warnings),
    )
    sections["Next"] = "\n".join(advice)
    if outcome is not None and suspects:
        sections["Chips"] = _list_chip_logs(board, ref, attempt.number, suspects[0])
    facts = {
        "state": standing.state,
        "reason": reason,
        "hosts": list(suspects),
        "attempts": [each.to_json() for each in gang.attempts],
        "stacks": {str(host): stack for host, stack in stacks.items()},
        "goodput": goodput.to_json(),
        "next": advice,
    }
    page = {title: words for title, words in sections.items() if words}
    return Explanation(page, ref.attributes() | facts | {"sections": page})


def _find_suspects(attempt: AttemptPicture, outcome: Outcome | None) -> tuple[int, ...]:
    """Return the hosts that failed first, or that stand still."""
    if outcome is not None:
        return () if outcome.first is None or outcome.ok else outcome.blamed
    members = enumerate(attempt.members)
    return tuple(host for host, member in members if member.state is HostState.STALLED)


def _find_notice(board: JobBoard, ref: JobRef, attempt: int) -> str:
    """Return the leader's notice that some hosts hold up the others in an attempt; "" for none."""
    notice = ""
    with contextlib.suppress(KineticError):
        for event in board.events(ref):
            if event.attempt == attempt and event.kind in (EventKind.WAITING, EventKind.RESUMED):
                notice = event.detail if event.kind is EventKind.WAITING else ""
    return notice


def _describe_group(attempt: AttemptPicture, hosts: Sequence[int], reason: str) -> str:
    """Return a line about hosts that ended in the same way, or do the same. The hosts' detail is
    left out if `reason`, the job's reason, already contains it."""
    member = attempt.hosts[hosts[0]]
    detail = f": {member.detail.splitlines()[0]}" if member.detail.strip() else ""
    detail = "" if member.detail.rstrip(".") in reason else detail
    return f"{name_hosts(hosts)}: {member.exit or member.state}{detail}"


def _describe_others(attempt: AttemptPicture, suspects: Sequence[int], reason: str) -> str:
    """Return how the hosts that are not suspects ended: a line for each way, largest first."""
    groups: dict[tuple[object, str], list[int]] = {}
    for host, member in enumerate(attempt.members):
        if host not in suspects:
            groups.setdefault((member.exit or member.state, member.detail), []).append(host)
    largest = sorted(groups.values(), key=len, reverse=True)[:_MOST_GROUPS]
    return "\n".join(_describe_group(attempt, hosts, reason) for hosts in largest)


def _describe_attempts(gang: GangPicture, goodput: GoodputReader) -> str:
    if len(gang.attempts) == 1:
        return ""
    lines = []
    for attempt, used in zip(gang.attempts, goodput.attempts, strict=True):
        ended, ready = attempt.ended_at, attempt.ready_at
        ran = f"after {text.duration(ended - ready)}" if ended and ready else ""
        words = f"{attempt.number}: {attempt.verdict or 'not ended'} {ran}".rstrip()
        lines += [f"{words}: {attempt.reason}" if attempt.reason else words]
        if uses := used.describe(goodput.cost):
            lines.append(f"   {uses}")
    return "\n".join(lines[-2 * _MOST_ATTEMPTS :])


def _describe_evictions(gang: GangPicture) -> str:
    """Return which hosts were taken away by the cluster, for each attempt."""
    evicted = {
        attempt.number: hosts
        for attempt in gang.attempts
        if (hosts := [h for h, its in enumerate(attempt.hosts) if its.exit is Exit.EVICTED])
    }
    return "\n".join(f"{name_hosts(hosts)} in attempt {n}" for n, hosts in evicted.items())


def _describe_memory(board: JobBoard, ref: JobRef, outcome: Outcome | None, host: int) -> str:
    """Return the peak memory of the hosts, and the last memory reading of the devices of `host`."""
    reports = () if outcome is None else outcome.reports
    used = Counter({report.host: report.peak_rss_bytes for report in reports})
    last: dict[str, float] = {}
    request = LogRequest(hosts=(host,), follow=False, tail=_MOST_LINES, metrics=True)
    with contextlib.suppress(KineticError):
        for _, parts in RowsReader(board.store, ref, request).read():
            last |= {
                name: values[-1]
                for rows in parts
                for name, values in zip(rows.names, rows.values, strict=True)
            }
    which = ", which used most" if len(used) > 1 else ""
    peak = [f"host {h}{which}: {text.size(n)}" for h, n in used.most_common(1) if n]
    if not peak and MEMORY in last:
        peak = [f"host {host}: {text.size(last[MEMORY])}"]
    if DEVICE_MEMORY in last and last.get(DEVICE_LIMIT, 0) > 0:
        limit = text.size(last[DEVICE_LIMIT])
        peak.append(
            f"the fullest device of host {host}: {text.size(last[DEVICE_MEMORY])} of {limit}"
        )
    return "; ".join(peak)


def _list_chip_logs(board: JobBoard, ref: JobRef, attempt: int, host: int) -> str:
    """Return the chip logs that a host kept, and the folder that holds them."""
    key = layout.HostKeys(ref.job_id, attempt, host).chip_logs
    with contextlib.suppress(KineticError):
        if entries := list(board.store.entries(key)):
            names = name_some([entry.key.removeprefix(f"{key}/") for entry in entries], 3)
            return f"{names} of host {host}, in {board.store.uri.rstrip('/')}/{key}"
    return ""


def _list_advice(
    ref: JobRef, state: str, outcome: Outcome | None, *, stands: bool, is_explained: bool
) -> list[str]:
    """Return advice on what to do next, most useful first. `stands`: the job stands still.
    `is_explained`: the reason has a warning that explains why the job took too long."""
    job_id = ref.job_id
    if outcome is None and stands:
        return [f"All stacks: kinetic jobs stacks {job_id}", "hang_timeout= ends a stalled job."]
    if outcome is None:
        waits = state == JobStatus.PENDING
        return [f"Stop waiting: kinetic jobs cancel {job_id}"] if waits else []
    if outcome.ok or outcome.first is None:
        return []
    has_limit = outcome.first.exit in (Exit.TIMEOUT, Exit.OVER_BUDGET)
    words = _CAUSE_FIRST if has_limit and is_explained else _ADVICE.get(outcome.first.exit)
    advice = [words] if words else []
    if outcome.first.exit is Exit.HANG:
        advice.append(f"All stacks: kinetic jobs stacks {job_id}")
    if not outcome.first.exit.kind.of_the_job:
        advice.append(failure.name_logs(job_id, outcome.first.host).replace("More", "All output"))
    return advice


def _take_end(lines: str) -> str:
    return "\n".join(lines.rstrip().splitlines()[-_MOST_LINES:])
