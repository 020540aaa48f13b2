"""Blame for a hung gang: hosts are grouped by equal stacks, and the odd ones out are blamed. Pure.

In: each host's Python stacks as faulthandler prints them. Out: hosts to blame, and text for users.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from kinetic._core.exits import SILENT_RANK
from kinetic._core.outcome import HostReport, blame_rank, name_hosts
from kinetic._core.values import dataclass

StackFrame = tuple[str, str]
"""Position ("train.py:12") and function of a call."""
STOPPED = "The worker process is stopped: it received SIGSTOP. SIGCONT continues it."
"""Text instead of the stacks of a host whose process cannot write them."""
RETURNED = "The function has returned."
"""Text instead of the stacks of a host that waits for the others to return."""

# Few jobs need these patterns, so `re` compiles them on first use.
_THREAD = r"(?m)^(Current thread|Thread) 0x[0-9a-fA-F]+.*most recent call first"
_HEADER = r"(Current thread|Thread)\b.*most recent call first"
_FRAME = r'^\s*File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$'
_HEX = r"0x[0-9a-fA-F]+"
_WAITING = r"[/\\]((site|dist)-packages[/\\](jax|jaxlib)|jax[/\\]_src|jaxlib)[/\\]"

_WRAPPERS = r"[/\\](traceback_util|contextlib|functools)\.py:"
"""Files whose functions only wrap another call; such calls are not named."""
_PACKAGES = r"^.*[/\\](site|dist)-packages[/\\]"
_LIBRARY = r"[/\\](site|dist)-packages[/\\]|[/\\]python3\.\d+[/\\]|^<frozen "

_MAX_TEXT = 4000
_WHY_CHARS = 400
_MOST_GROUPS = 3
_MOST_TEXT_LINES = 8
_MOST_OWN, _MOST_INNER = 2, 5
"""Limits of the calls shown of a host: calls of the user's code, and calls of libraries below them
(one if the host waits)."""


@dataclass(frozen=True)
class Stack:
    """The main thread of a worker, most recent call first.

    Attributes:
        frames: position and function of each call; empty if the text could not be parsed.
        text: the text that could not be parsed, without addresses; "" if the host did not answer.
    """

    frames: tuple[StackFrame, ...] = ()
    text: str = ""

    @property
    def silent(self) -> bool:
        """True if the host did not answer."""
        return not self.frames and not self.text

    @property
    def returned(self) -> bool:
        """True if the function has returned, so that there are no frames."""
        return self.text == RETURNED

    @property
    def own(self) -> tuple[StackFrame, ...]:
        """The calls in the user's code, most recent first."""
        return tuple(frame for frame in self.frames if not re.search(_LIBRARY, frame[0]))

    @property
    def called(self) -> StackFrame | None:
        """The call of the user's code into JAX in which the host waits; None if unknown."""
        if not self.waits or not self.own:
            return None
        below = self.frames[: self.frames.index(self.own[0])]
        return next((f for f in reversed(below) if not re.search(_WRAPPERS, f[0])), None)

    @property
    def waits(self) -> bool:
        """True if the innermost call is inside JAX: it waits for other hosts, or for the device."""
        return bool(self.frames) and re.search(_WAITING, self.frames[0][0]) is not None


def parse(text: str) -> Stack:
    """Parse the main thread's calls, without addresses, so that hosts can be compared."""
    frames = tuple(
        (f"{m['file']}:{m['line']}", re.sub(_HEX, "", m["function"].strip()))
        for line in main_thread(text).splitlines()
        if (m := re.match(_FRAME, line))
    )
    return Stack(frames) if frames else Stack(text=re.sub(_HEX, "", text).strip()[:_MAX_TEXT])


def odd_hosts(stacks: Mapping[int, str], returned: Collection[int]) -> tuple[int, ...]:
    """Return the hosts that hold the others up, lowest index first.

    Hosts that did not answer ("", or no stack) are suspects; if all answered, hosts that do not
    wait inside JAX. The smallest group of suspects with equal stacks is blamed, or all groups of
    this size.
    """
    parsed = {host: parse(text) for host, text in stacks.items() if host not in returned}
    running = {host: stack for host, stack in parsed.items() if not stack.returned}
    # A host that answers without frames (its process is stopped) is as suspect as a silent one.
    without_answer = {host: stack for host, stack in running.items() if not stack.frames}
    suspects = without_answer or _drop_waiting(running) or running
    groups = _group(suspects)
    smallest = min(map(len, groups.values()), default=0)
    return tuple(
        sorted(host for hosts in groups.values() if len(hosts) == smallest for host in hosts)
    )


def holding_up(stacks: Mapping[int, str]) -> tuple[int, ...]:
    """Return the hosts for which all others certainly wait.

    These are the hosts with a stopped process; else, if some hosts wait inside JAX, the hosts that
    stand still outside it. () if all hosts may wait for something else, such as a computation on
    their devices.
    """
    parsed = {host: parse(text) for host, text in stacks.items()}
    if stopped := [host for host, stack in parsed.items() if stack.text == STOPPED]:
        return tuple(sorted(stopped))
    if not all(stack.frames for stack in parsed.values()):
        return ()
    outside = sorted(_drop_waiting(parsed))
    return tuple(outside) if len(outside) < len(parsed) else ()


def all_wait(stacks: Mapping[int, str]) -> bool:
    """True if all hosts wait inside JAX."""
    return all(parse(text).waits for text in stacks.values())


def describe_waits(stacks: Mapping[int, str]) -> str:
    """Return a sentence with the line of each host, if all wait inside JAX at different lines of
    the user's code; else ""."""
    positions: dict[str, list[int]] = {}
    for host in sorted(stacks) if all_wait(stacks) else ():
        positions.setdefault(_locate(parse(stacks[host])), []).append(host)
    waits = [f"{name_hosts(at)} {_conjugate(at, 'wait')}{line}" for line, at in positions.items()]
    return f"{'; '.join(waits)}." if len(waits) > 1 else ""


def describe_position(text: str) -> str:
    """Return " at train.py:12 in load"; or, in brackets, the text that replaces the stacks."""
    stack = parse(text)
    return _locate(stack) if stack.frames else f" ({stack.text.splitlines()[0].rstrip('.')})"


def explain_hang(
    stacks: Mapping[int, str], stalled: Collection[int], odd: Collection[int], stood_still: str
) -> str:
    """Return a sentence that names the hosts that hold a gang up.

    Args:
        stacks: stacks of all hosts; `RETURNED` for hosts that have returned.
        stalled: the hosts that stood still.
        odd: the result of `odd_hosts`.
        stood_still: beginning of the sentence: which hosts stood still for how long.
    """
    parsed = {host: parse(text) for host, text in stacks.items()}
    returned = [host for host, stack in parsed.items() if stack.returned]
    running = {host: stack for host, stack in parsed.items() if not stack.returned}
    if returned and running and all(stack.waits for stack in running.values()):
        return (
            f"{_describe_returned(returned)}; {_describe_waits(returned, running)}. "
            f"{stood_still[:1].upper()}{stood_still[1:]}"
        )
    if not set(odd) & set(stalled):
        stood_still += f"; waiting for {name_hosts(odd)}"
    elif len(odd) < len(stalled):
        stood_still += f"; {name_hosts(odd)} {_conjugate(odd, 'differ')} from the others"
    return f"{stood_still}; {_describe_returned(returned)}" if returned else stood_still


def notice_of(
    returned: Collection[int], busy: Collection[int], seconds: float, cause: str | None = None
) -> str:
    """Return a notice that some hosts have returned while all others are stalled. It names the
    `cause`; without one, it says that the stalled hosts may wait for the others in a collective."""
    them, do = (
        "it" if len(returned) == 1 else "them",
        "does it wait" if len(busy) == 1 else "do they wait",
    )
    still = f"{name_hosts(busy)} {_conjugate(busy, 'have')} stood still for {seconds:g} s"
    cause = cause or f"{do} for {them} in a collective?"
    return f"{_describe_returned(returned)}, and {still}: {cause}"


def _describe_returned(hosts: Collection[int]) -> str:
    return f"{name_hosts(hosts)} {_conjugate(hosts, 'have')} returned"


def _describe_waits(returned: Collection[int], running: Mapping[int, Stack]) -> str:
    them = "it" if len(returned) == 1 else "them"
    positions: dict[str, list[int]] = {}
    for host in sorted(running):
        # " in sync_global_devices" if the host waits in a public function of JAX.
        called = running[host].called
        name = "" if called is None or called[1].startswith(("_", "<")) else f" in {called[1]}"
        positions.setdefault(name + _locate(running[host]), []).append(host)
    texts = [
        f"{name_hosts(hosts)} {_conjugate(hosts, 'wait')} for {them}{position}"
        for position, hosts in positions.items()
    ]
    return "; ".join(texts[:_MOST_GROUPS])


def format_groups(stacks: Mapping[int, str]) -> str:
    """Format each group of equal stacks, most recent call last: hosts that have returned, the odd
    hosts, then the others, smallest group first."""
    groups = _group({host: parse(text) for host, text in stacks.items()})
    odd = set(odd_hosts(stacks, ()))
    order = sorted(
        groups.items(),
        key=lambda item: (not item[0].returned, item[1][0] not in odd, len(item[1]), item[1]),
    )
    return "\n".join(
        f"{_title(stack, hosts)}\n{'' if stack.returned else _format_stack(stack)}"
        for stack, hosts in order
    )


def summarize_groups(stacks: Mapping[int, str], blamed: Collection[int]) -> str:
    """Format the stacks of hung hosts on less than a screen: hosts that have returned, hosts to
    blame, then the others, largest group first."""
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
    """Return the title of a group: its hosts, and their line of the user's code."""
    if stack.returned:
        return _describe_returned(hosts)
    if not stack.frames:
        return f"{name_hosts(hosts)}:"
    return (
        f"{name_hosts(hosts)} "
        f"{_conjugate(hosts, 'wait' if stack.waits else 'are')}{_locate(stack)}:"
    )


def _locate(stack: Stack) -> str:
    where, function = (stack.own or stack.frames)[0]
    return f" at {where.replace(chr(92), '/').rpartition('/')[2]} in {function}"


def _conjugate(hosts: Collection[int], plural: str) -> str:
    singular = {"have": "has", "are": "is"}
    return plural if len(hosts) > 1 else singular.get(plural, f"{plural}s")


def _format_innermost(stack: Stack) -> str:
    """Format the last calls of the user's code and the innermost calls of libraries below them."""
    if not stack.frames:
        return _format_stack(Stack(text="\n".join(stack.text.splitlines()[:_MOST_TEXT_LINES])))
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
    # threads it prints only the newest 100 and "...". The main thread is then the current thread,
    # because it took the signal.
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


def _drop_waiting(stacks: Mapping[int, Stack]) -> dict[int, Stack]:
    return {host: stack for host, stack in stacks.items() if not stack.waits}


def _format_stack(stack: Stack) -> str:
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
    """Return the rank of a report (see `ExitKind.rank`), but 0 for every cause, so that the first
    cause counts."""
    rank = blame_rank(report)
    return 0 if rank < SILENT_RANK else rank


def improves(new: HostReport, old: HostReport) -> bool:
    """True if the new report says that the host itself failed, and the old one was a guess."""
    return old.exit.kind.hearsay and blame_rank(new) < SILENT_RANK


def why(report: HostReport) -> str:
    """Return one line on why a host failed."""
    raised = "" if report.error is None else report.error.summary
    lines = (report.detail or raised or str(report.exit)).splitlines()
    return lines[0][:_WHY_CHARS] if lines else str(report.exit)
