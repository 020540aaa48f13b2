"""Who holds a gang up: equal stacks put together, and the odd host out.

In: each host's Python stacks as faulthandler prints them. Out: hosts to blame, and text for people. Called by `gang` when a gang
stands still, and by whoever shows the stacks of a running job. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

Frame = tuple[str, str]
"""Where ("train.py:12") and in what function."""

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-fA-F]+.*most recent call first", re.MULTILINE)
_HEADER = re.compile(r"(Current thread|Thread)\b.*most recent call first")
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_WAITING = re.compile(r"[/\\]((site|dist)-packages[/\\](jax|jaxlib)|jax[/\\]_src|jaxlib)[/\\]")

_PACKAGES = re.compile(r"^.*[/\\](site|dist)-packages[/\\]")
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]python3\.\d+[/\\]|^<frozen ")

_MAX_TEXT = 4000
_MAX_RUNS = 12
_MOST_GROUPS = 3
_MOST_FRAMES = 8
"""Of a host to blame; of the others two of their own code and the innermost one."""


@dataclass(frozen=True)
class Stack:
    """The main thread of a worker, most recent call first.

    Attributes:
        frames: where and in what function; empty when the text was not understood.
        text: what there was instead of frames, without addresses; "" means that the host did not answer.
    """

    frames: tuple[Frame, ...] = ()
    text: str = ""

    @property
    def silent(self) -> bool:
        """Whether the host did not answer."""
        return not self.frames and not self.text

    @property
    def waits(self) -> bool:
        """Whether the innermost call is inside JAX: it waits for the others, or for the device."""
        return bool(self.frames) and _WAITING.search(self.frames[0][0]) is not None


def parse(text: str) -> Stack:
    """Keep what tells two hosts apart: the main thread's calls, without addresses."""
    frames = tuple(_frame(m) for line in main_thread(text).splitlines() if (m := _FRAME.match(line)))
    return Stack(frames) if frames else Stack(text=_HEX.sub("", text).strip()[:_MAX_TEXT])


def odd_hosts(stacks: Mapping[int, str], returned: Collection[int]) -> tuple[int, ...]:
    """Name the hosts that hold the others up, lowest index first.

    A host that did not answer ("", or no stack) is most to blame. One that waits inside JAX is not blamed while another does
    something else.
    Among those left the smallest group with equal stacks stands out; groups of one size cannot be told apart: all are named.
    """
    parsed = {host: parse(text) for host, text in stacks.items() if host not in returned}
    suspects = _without_answer(parsed) or _not_waiting(parsed) or parsed
    groups = _group(suspects)
    smallest = min(map(len, groups.values()), default=0)
    return tuple(sorted(host for hosts in groups.values() if len(hosts) == smallest for host in hosts))


def format_groups(stacks: Mapping[int, str]) -> str:
    """Print equal stacks once, most recent call last; the odd hosts first, then the smaller groups."""
    groups = _group({host: parse(text) for host, text in stacks.items()})
    odd = set(odd_hosts(stacks, ()))
    order = sorted(groups.items(), key=lambda item: (item[1][0] not in odd, len(item[1]), item[1]))
    return "\n".join(f"{name_hosts(hosts)}:\n{_show(stack)}" for stack, hosts in order)


def summarize_groups(stacks: Mapping[int, str], blamed: Collection[int]) -> str:
    """Print on less than a screen where hosts that hung stood: those to blame first, and what the others waited in."""
    groups = _group({host: parse(text) for host, text in stacks.items()})
    guilty = [(stack, hosts) for stack, hosts in groups.items() if hosts[0] in blamed]
    others = sorted(((s, h) for s, h in groups.items() if h[0] not in blamed), key=lambda item: (-len(item[1]), item[1]))
    shown = [f"{name_hosts(hosts)}:\n{_innermost(stack)}" for stack, hosts in guilty[:_MOST_GROUPS]]
    shown += [f"{name_hosts(hosts)} {_does(stack, hosts)}:\n{_gist(stack)}" for stack, hosts in others[:_MOST_GROUPS]]
    rest = [host for part in (guilty, others) for _, hosts in part[_MOST_GROUPS:] for host in hosts]
    return "".join(shown) + (f"{name_hosts(rest)}: elsewhere\n" if rest else "")


def _does(stack: Stack, hosts: Collection[int]) -> str:
    return ("waits in" if len(hosts) == 1 else "wait in") if stack.waits else ("is at" if len(hosts) == 1 else "are at")


def _innermost(stack: Stack) -> str:
    more = len(stack.frames) - _MOST_FRAMES
    head = f"  … {more} more calls …\n" if more > 0 else ""
    return head + _show(Stack(stack.frames[:_MOST_FRAMES], "\n".join(stack.text.splitlines()[:_MOST_FRAMES])))


def _gist(stack: Stack) -> str:
    """Where in its own code, and in what that waits; the many calls in between are left out."""
    own = [frame for frame in stack.frames if not _LIBRARY.search(frame[0])][:2]
    frames = own if not stack.frames or stack.frames[0] in own else [stack.frames[0], *own]
    short = tuple((_PACKAGES.sub("", where), function) for where, function in frames)
    return _show(Stack(short, "\n".join(stack.text.splitlines()[:2])))


def name_hosts(hosts: Iterable[int]) -> str:
    """Return "host 3" or "hosts 0, 2-5"; of very many, the first and how many more there are."""
    runs = _runs(sorted(set(hosts)))
    names = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS])
    more = sum(last - first + 1 for first, last in runs[_MAX_RUNS:])
    names += f" and {more} more" if more else ""
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"host {names}" if one else f"hosts {names}"


def _runs(ordered: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for host in ordered:
        if runs and host == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], host)
        else:
            runs.append((host, host))
    return runs


def _frame(match: re.Match[str]) -> Frame:
    return f"{match['file']}:{match['line']}", _HEX.sub("", match["function"].strip())


def main_thread(text: str) -> str:
    """Return the part of a dump that tells where the main thread is, most recent call first."""
    # faulthandler prints the newest thread first, so the main thread comes last; of more than 100 threads it prints the newest
    # 100 and "...", and then only the thread that took the signal, which is the main one, is worth having.
    starts = [m.start() for m in _THREAD.finditer(text)]
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


def _without_answer(stacks: Mapping[int, Stack]) -> dict[int, Stack]:
    # One that says something else than where it stands (its process is stopped) is as much to blame as one that says nothing.
    return {host: stack for host, stack in stacks.items() if not stack.frames}


def _not_waiting(stacks: Mapping[int, Stack]) -> dict[int, Stack]:
    return {host: stack for host, stack in stacks.items() if not stack.waits}


def _show(stack: Stack) -> str:
    if stack.silent:
        return "  (no answer)\n"
    lines = [f"  {where} in {function}" for where, function in reversed(stack.frames)] or [
        f"  {line.strip()}" for line in stack.text.splitlines() if line.strip() and not _HEADER.match(line)
    ]
    lines = lines or ["  (runs no Python code)"]
    return "\n".join(lines) + "\n"
