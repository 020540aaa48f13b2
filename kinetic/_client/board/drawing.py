"""Drawings of jobs as HTML for notebooks: slices, hosts and chips, each host with its state. Pure.

In: topologies, events, outcomes. Out: HTML and plain text.

A drawing needs no style sheet, script, font or image. Text has the page's colour and every state is
written out, so that it is readable on light and dark pages, without colours, and without styles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from kinetic._client.board import text as words
from kinetic._client.board.colours import rgb
from kinetic._client.board.shape import topology_of
from kinetic._core.accelerators.topology import Topology
from kinetic._core.events import GangEvent
from kinetic._core.gang.picture import picture_of
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass

_DETAILED_HOSTS = 64
"""Gangs of up to this size are drawn with numbers and chips, larger ones as a square per host."""
_MOST_HOSTS = 1024
_MOST_CHIPS = 16
_WIDEST_ROW = 8
_NARROWEST_PX = 80
"""Minimum width of a host, enough for "63 returned", so that hosts line up in columns."""
_FRAME = (
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4;max-width:100%;"
    "overflow-wrap:anywhere"
)
_GRID = "display:grid;grid-template-columns:repeat(32,max-content);gap:2px"


@dataclass(frozen=True)
class Picture:
    """The content of a drawing.

    Attributes:
        title: the name of the function.
        facts: texts after the title: the job's id, the accelerator, the duration.
        state: the state of the job; "" for none.
        topology: the shape of each slice; None if unknown, then hosts are drawn without chips.
        hosts: the state of each host, by index.
        rows: names and values below the drawing.
    """

    title: str
    facts: tuple[str, ...]
    state: str
    topology: Topology | None
    hosts: tuple[str, ...]
    rows: tuple[tuple[str, str], ...] = ()


def html(picture: Picture) -> str:
    """Return a picture as HTML."""
    dot = f'<span style="color:rgb({rgb(picture.state)})">●</span>'
    state = f" · {dot} {escape(picture.state)}" if picture.state else ""
    parts = [
        _head(picture.title, picture.facts, state),
        _slices(picture),
        _table(picture.rows),
    ]
    label = escape(text(picture), quote=True)
    return f'<div role="group" aria-label="{label}" style="{_FRAME}">{"".join(parts)}</div>'


def of_job(
    ref: JobRef,
    state: str,
    events: Iterable[GangEvent],
    outcome: Outcome | None,
    now: float,
) -> Picture:
    """Return the picture of a job, running or ended."""
    until = outcome.ended_at if outcome is not None and outcome.ended_at else now
    facts = (ref.job_id, ref.accelerator, words.duration(until - ref.created_at))
    reason = (
        (("reason", outcome.reason),)
        if outcome is not None and outcome.reason and not outcome.ok
        else ()
    )
    return Picture(
        ref.display_name,
        facts,
        state,
        topology_of(ref),
        tuple(host.state for host in picture_of(events, ref.hosts, outcome).current.members),
        reason,
    )


def batch_html(title: str, facts: Sequence[str], states: Sequence[str]) -> str:
    """Return the drawing of a batch as HTML, with a square for each input."""
    squares = "".join(
        _square(state, index, None, "input") for index, state in enumerate(states[:_MOST_HOSTS])
    )
    head, more = _head(title, (*facts, summary(states, "input"))), _count_omitted(states, "inputs")
    return (
        f'<div role="group" style="{_FRAME}">{head}<div style="{_GRID}">{squares}</div>{more}</div>'
    )


def _head(title: str, facts: Sequence[str], state: str = "") -> str:
    details = "".join(f' <span style="opacity:.75">· {escape(fact)}</span>' for fact in facts)
    return f'<div style="margin-bottom:6px"><b>{escape(title)}</b>{state}{details}</div>'


def _count_omitted(drawn: Sequence[str], noun: str) -> str:
    omitted = len(drawn) - _MOST_HOSTS
    return f'<div style="opacity:.75">and {omitted:,} more {noun}</div>' if omitted > 0 else ""


def text(picture: Picture) -> str:
    """Return a picture as one line of text."""
    parts = [picture.title, picture.state, *picture.facts, summary(picture.hosts)]
    return " · ".join(part for part in parts if part)


def summary(states: Sequence[str], noun: str = "host") -> str:
    """Return the counts of the states: "4 hosts: 3 running, 1 failed"."""
    counts = Counter(states)
    noun = f"1 {noun}" if len(states) == 1 else f"{len(states):,} {noun}s"
    counted = (
        next(iter(counts), "")
        if len(counts) == 1
        else ", ".join(f"{n:,} {state}" for state, n in counts.most_common())
    )
    return f"{noun}: {counted}" if counted else noun


def _slices(picture: Picture) -> str:
    of_one = len(picture.hosts) if picture.topology is None else picture.topology.hosts
    states = picture.hosts[:_MOST_HOSTS]
    count = -(-len(picture.hosts) // of_one) if of_one else 0
    drawn = [
        _slice(picture, index, states[start : start + of_one], start, count)
        for index, start in enumerate(range(0, len(states), max(of_one, 1)))
    ]
    more = _count_omitted(picture.hosts, "hosts")
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(drawn)}</div>{more}'


def _slice(picture: Picture, index: int, states: Sequence[str], first: int, count: int) -> str:
    detailed = len(picture.hosts) <= _DETAILED_HOSTS
    hosts = "".join(
        (_host if detailed else _square)(state, first + n, picture.topology)
        for n, state in enumerate(states)
    )
    name = f"slice {index} · " if count > 1 else ""
    shape = (
        ""
        if picture.topology is None
        else f"{picture.topology.name} · {picture.topology.shape_text} · "
    )
    head = (
        "<div "
        'style="font-size:11px;opacity:.75;'
        f'margin-bottom:4px">{escape(name + shape + summary(states))}</div>'
    )
    grid = _GRID
    if detailed:  # Wraps in a narrow page.
        grid = (
            "display:flex;flex-wrap:wrap;gap:6px;"
            f"max-width:{_WIDEST_ROW * (_host_px(picture.topology) + 6)}px"
        )
    box = "border:1px solid rgba(139,141,152,.4);border-radius:6px;padding:6px 8px"
    return f'<div style="{box}">{head}<div style="{grid}">{hosts}</div></div>'


def _host(state: str, index: int, topology: Topology | None) -> str:
    colour, chips = rgb(state), _count_chips(topology)
    chip = (
        "display:inline-block;width:9px;height:9px;margin:0 2px 2px "
        f"0;border-radius:2px;background:rgb({colour})"
    )
    row = f'<span style="{chip}"></span>' * chips
    below = f'<div style="line-height:1">{row}</div>' if chips else ""
    words = f'<div style="font-size:11px;white-space:nowrap">{index} {escape(state)}</div>'
    box = (
        f"border:1px solid rgb({colour});background:rgba({colour},.12);border-radius:4px;"
        f"padding:3px 6px;box-sizing:border-box;min-width:{_host_px(topology)}px"
    )
    return f'<div style="{box}">{words}{below}</div>'


def _count_chips(topology: Topology | None) -> int:
    return 0 if topology is None else min(topology.chips_per_host, _MOST_CHIPS)


def _host_px(topology: Topology | None) -> int:
    return max(_NARROWEST_PX, 14 + 11 * _count_chips(topology))


def _square(state: str, index: int, _topology: Topology | None, noun: str = "host") -> str:
    colour = rgb(state)
    style = f"width:9px;height:9px;border-radius:2px;background:rgb({colour})"
    return f'<div title="{noun} {index}: {escape(state, quote=True)}" style="{style}"></div>'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cell = (
        "padding:1px 12px 1px 0;text-align:left;vertical-align:top;background:transparent;border:0"
    )
    head_style = "font-weight:normal;opacity:.75;white-space:nowrap"
    body = "".join(
        f'<tr style="background:transparent"><th style="{cell};{head_style}">{escape(name)}</th>'
        f'<td style="{cell};overflow-wrap:anywhere">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table style="border-collapse:collapse;margin-top:6px;font-size:12px">{body}</table>'
