"""Which hosts hold a gang up: hosts are grouped by equal stacks, and the odd ones out are blamed.

In: each host's Python stacks as faulthandler prints them. Out: hosts to blame, and text for users.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from kinetic._core.exits import SILENT_RANK
from kinetic._core.outcome import HostReport, blame_rank, name_hosts
from kinetic._core.values import dataclass

StackFrame = tuple[str, str]
"""Where ("train.py:12") and in what function."""
STOPPED = "The worker process is stopped: it received SIGSTOP. SIGCONT continues it."
"""Takes the place of the stacks of a host whose process cannot write them."""
RETURNED = "The function has returned."
"""Takes the place of the stacks of a host that waits for the others to return."""

# Patterns that few jobs need: `re` compiles them when they are.
_THREAD = r"(?m)^(Current thread|Thread) 0x[0-9a-fA-F]+.*most recent call first"
_HEADER = r"(Current thread|Thread)\b.*most recent call first"
_FRAME = r'^\s*File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$'
_HEX = r"0x[0-9a-fA-F]+"
_WAITING = r"[/\\]((site|dist)-packages[/\\](jax|jaxlib)|jax[/\\]_src|jaxlib)[/\\]"

_WRAPPERS = r"[/\\](traceback_util|contextlib|functools)\.py:"
"""Calls between what is called and what calls it."""
_PACKAGES = r"^.*[/\\](site|dist)-packages[/\\]"
_LIBRARY = r"[/\\](site|dist)-packages[/\\]|[/\\]python3\.\d+[/\\]|^<frozen "

_MAX_TEXT = 4000
_WHY_CHARS = 400
_MOST_GROUPS = 3
_MOST_TEXT_LINES = 8
_MOST_OWN, _MOST_INNER = 2, 5
"""How many calls to show of a host: of its own code, and below them of libraries (one if it
waits)."""


@dataclass(frozen=True)
class Stack:
    """The main thread of a worker, most recent call first.

    Attributes:
        frames: where and in what function; empty if the text could not be parsed.
        text: the text that could not be parsed, without addresses; "" if the host did not answer.
    """

    frames: tuple[StackFrame, ...] = ()
    text: str = ""

    @property
    def silent(self) -> bool:
        """Whether the host did not answer."""
        return not self.frames and not self.text

    @property
    def returned(self) -> bool:
        """Whether the function has returned, so that there are no frames."""
        return self.text == RETURNED

    @property
    def own(self) -> tuple[StackFrame, ...]:
        """The calls in the user's code, most recent first."""
        return tuple(frame for frame in self.frames if not re.search(_LIBRARY, frame[0]))

    @property
    def called(self) -> StackFrame | None:
        """What the user's code has called in JAX, of a host that waits there; None if unknown."""
        if not self.waits or not self.own:
            return None
        below = self.frames[: self.frames.index(self.own[0])]
        return next((f for f in reversed(below) if not re.search(_WRAPPERS, f[0])), None)

    @property
    def waits(self) -> bool:
        """Whether the innermost call is inside JAX: it waits for the others, or for the device."""
        return bool(self.frames) and re.search(_WAITING, self.frames[0][0]) is not None


def parse(text: str) -> Stack:
    """Return what can be compared between hosts: the main thread's calls, without addresses."""
    frames = tuple(
        (f"{m['file']}:{m['line']}", re.sub(_HEX, "", m["function"].strip()))
        for line in main_thread(text).splitlines()
        if (m := re.match(_FRAME, line))
    )
    return Stack(frames) if frames else Stack(text=re.sub(_HEX, "", text).strip()[:_MAX_TEXT])


def odd_hosts(stacks: Mapping[int, str], returned: Collection[int]) -> tuple[int, ...]:
    """Return the hosts that hold the others up, lowest index first.

    Hosts that did not answer ("", or no stack) come first; else those that do not wait inside JAX.
    Among these the smallest group with equal stacks is blamed; groups of equal size are all blamed.
    """
    parsed = {host: parse(text) for host, text in stacks.items() if host not in returned}
    running = {host: stack for host, stack in parsed.items() if not stack.returned}
    # A host that answers without frames (its process is stopped) is as suspect as a silent one.
    without_answer = {host: stack for host, stack in running.items() if not stack.frames}
    suspects = without_answer or _not_waiting(running) or running
    groups = _group(suspects)
    smallest = min(map(len, groups.values()), default=0)
    return tuple(
        sorted(host for hosts in groups.values() if len(hosts) == smallest for host in hosts)
    )


def holding_up(stacks: Mapping[int, str]) -> tuple[int, ...]:
    """Return the hosts for which all others certainly wait: those that are stopped; else, where
    some wait inside JAX, those that stand still elsewhere. () where all of them may wait for
    something else, a computation on their devices for example."""
    parsed = {host: parse(text) for host, text in stacks.items()}
    if stopped := [host for host, stack in parsed.items() if stack.text == STOPPED]:
        return tuple(sorted(stopped))
    if not all(stack.frames for stack in parsed.values()):
        return ()
    elsewhere = sorted(_not_waiting(parsed))
    return tuple(elsewhere) if len(elsewhere) < len(parsed) else ()


def place_of(text: str) -> str:
    """Return " at train.py:12 in load", or what stands instead of stacks."""
    stack = parse(text)
    return _place(stack) if stack.frames else f" ({stack.text.splitlines()[0].rstrip('.')})"


def explain_hang(
    stacks: Mapping[int, str], stalled: Collection[int], odd: Collection[int], stood_still: str
) -> str:
    """Say in one sentence which hosts hold a gang up.

    Args:
        stacks: of all hosts; `RETURNED` for those that have returned.
        stalled: the hosts that stood still.
        odd: the hosts returned by `odd_hosts`.
        stood_still: the beginning of the sentence: which hosts stood still for how long.
    """
    parsed = {host: parse(text) for host, text in stacks.items()}
    returned = [host for host, stack in parsed.items() if stack.returned]
    running = {host: stack for host, stack in parsed.items() if not stack.returned}
    if returned and running and all(stack.waits for stack in running.values()):
        return (
            f"{_have_returned(returned)}; {_wait_for(returned, running)}. "
            f"{stood_still[:1].upper()}{stood_still[1:]}"
        )
    if not set(odd) & set(stalled):
        stood_still += f"; waiting for {name_hosts(odd)}"
    elif len(odd) < len(stalled):
        stood_still += f"; {name_hosts(odd)} {_conjugate(odd, 'stand')} apart"
    return f"{stood_still}; {_have_returned(returned)}" if returned else stood_still


def notice_of(returned: Collection[int], busy: Collection[int], seconds: float) -> str:
    """Say that some hosts have returned while all others are stalled, and ask whether they wait in
    a collective."""
    them, do = (
        "it" if len(returned) == 1 else "them",
        "does it wait" if len(busy) == 1 else "do they wait",
    )
    still = f"{name_hosts(busy)} {_conjugate(busy, 'have')} stood still for {seconds:g} s"
    return f"{_have_returned(returned)}, and {still}: {do} for {them} in a collective?"


def _have_returned(hosts: Collection[int]) -> str:
    return f"{name_hosts(hosts)} {_conjugate(hosts, 'have')} returned"


def _wait_for(returned: Collection[int], running: Mapping[int, Stack]) -> str:
    them = "it" if len(returned) == 1 else "them"
    places: dict[str, list[int]] = {}
    for host in sorted(running):
        # " in sync_global_devices" for a host that waits in what users know by its name.
        called = running[host].called
        name = "" if called is None or called[1].startswith(("_", "<")) else f" in {called[1]}"
        places.setdefault(name + _place(running[host]), []).append(host)
    texts = [
        f"{name_hosts(hosts)} {_conjugate(hosts, 'wait')} for {them}{place}"
        for place, hosts in places.items()
    ]
    return "; ".join(texts[:_MOST_GROUPS])


def format_groups(stacks: Mapping[int, str]) -> str:
    """Format equal stacks once, most recent call last: hosts that have returned, the odd hosts,
    then the others, smallest group first."""
    groups = _group({host: parse(text) for host, text in stacks.items()})
    odd = set(odd_hosts(stacks, ()))
    order = sorted(
        groups.items(),
        key=lambda item: (not item[0].returned, item[1][0] not in odd, len(item[1]), item[1]),
    )
    return "\n".join(
        f"{_title(stack, hosts)}\n{'' if stack.returned else _show(stack)}"
        for stack, hosts in order
    )


def summarize_groups(stacks: Mapping[int, str], blamed: Collection[int]) -> str:
    """Format on less than a screen where hung hosts stood: hosts that have returned, hosts to
    blame, and what the others waited in."""
    groups = _group({host: parse(text) for host, text in stacks.items()})
    returned = [f"{_title(stack, hosts)}\n" for stack, hosts in groups.items() if stack.returned]
    guilty = [
        (stack, hosts)
        for stack, hosts in groups.items()
        if hosts[0] in blamed and not stack.returned
    ]
    others = [
        (stack, hosts)
        for stack, hosts in groups.items()
        if hosts[0] not in blamed and not stack.returned
    ]
    others.sort(key=lambda item: (-len(item[1]), item[1]))
    texts = [
        f"{_title(stack, hosts)}\n{_format_innermost(stack)}"
        for part in (guilty, others)
        for stack, hosts in part[:_MOST_GROUPS]
    ]
    rest = [host for part in (guilty, others) for _, hosts in part[_MOST_GROUPS:] for host in hosts]
    return "".join([*returned, *texts]) + (f"{name_hosts(rest)}: elsewhere\n" if rest else "")


def _title(stack: Stack, hosts: Collection[int]) -> str:
    """Return which hosts, at what line of their own code."""
    if stack.returned:
        return _have_returned(hosts)
    if not stack.frames:
        return f"{name_hosts(hosts)}:"
    return (
        f"{name_hosts(hosts)} "
        f"{_conjugate(hosts, 'wait') if stack.waits else _conjugate(hosts, 'are')}{_place(stack)}:"
    )


def _place(stack: Stack) -> str:
    where, function = (stack.own or stack.frames)[0]
    return f" at {where.replace(chr(92), '/').rpartition('/')[2]} in {function}"


def _conjugate(hosts: Collection[int], plural: str) -> str:
    singular = {"have": "has", "are": "is"}
    return plural if len(hosts) > 1 else singular.get(plural, f"{plural}s")


def _format_innermost(stack: Stack) -> str:
    """Format the last calls of its own code and the innermost ones of libraries below."""
    if not stack.frames:
        return _show(Stack(text="\n".join(stack.text.splitlines()[:_MOST_TEXT_LINES])))
    depth = next(
        (n for n, frame in enumerate(stack.frames) if not re.search(_LIBRARY, frame[0])),
        len(stack.frames),
    )
    inner = stack.frames[: min(depth, 1 if stack.waits else _MOST_INNER)]
    called = [stack.called] if stack.called and stack.called not in inner else []
    left_out = depth - len(inner) - len(called)
    more = [f"  … {left_out} more {'call' if left_out == 1 else 'calls'} …"] if left_out else []
    own, first, below = (
        [f"  {re.sub(_PACKAGES, '', where)} in {function}" for where, function in reversed(frames)]
        for frames in (stack.own[:_MOST_OWN], called, inner)
    )
    return "\n".join([*own, *first, *more, *below]) + "\n"


def main_thread(text: str) -> str:
    """Return the main thread's part of a dump, most recent call first."""
    # faulthandler prints the newest thread first, so the main thread comes last. Of more than 100
    # threads it prints the newest 100 and "..."; then the current thread, which took the signal, is
    # the main one.
    starts = [m.start() for m in re.finditer(_THREAD, text)]
    if not starts:
        return text
    sections = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    cut_off = sections[-1].rstrip().endswith("\n...")
    current = [section for section in sections if section.startswith("Current")]
    return current[0] if cut_off and current else sections[-1]


def _group(stacks: Mapping[int, Stack]) -> dict[Stack, list[int]]:
    groups: dict[Stack, list[int]] = {}
    for host in sorted(stacks):
        groups.setdefault(stacks[host], []).append(host)
    return groups


def _not_waiting(stacks: Mapping[int, Stack]) -> dict[int, Stack]:
    return {host: stack for host, stack in stacks.items() if not stack.waits}


def _show(stack: Stack) -> str:
    if stack.silent:
        return "  (no answer)\n"
    lines = [f"  {where} in {function}" for where, function in reversed(stack.frames)] or [
        f"  {line.strip()}"
        for line in stack.text.splitlines()
        if line.strip() and not re.match(_HEADER, line)
    ]
    lines = lines or ["  (runs no Python code)"]
    return "\n".join(lines) + "\n"


def rank_of(report: HostReport) -> int:
    """Return the rank of a report (see `ExitKind.rank`), 0 for a cause: of causes the first
    counts."""
    rank = blame_rank(report)
    return 0 if rank < SILENT_RANK else rank


def improves(new: HostReport, old: HostReport) -> bool:
    """Whether a host that was given up or stopped turns out to have failed on its own."""
    return old.exit.kind.hearsay and blame_rank(new) < SILENT_RANK


def why(report: HostReport) -> str:
    """Say in one line why a host failed."""
    raised = "" if report.error is None else report.error.summary
    lines = (report.detail or raised or str(report.exit)).splitlines()
    return lines[0][:_WHY_CHARS] if lines else str(report.exit)
