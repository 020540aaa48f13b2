"""The colours of states of jobs, hosts, inputs and findings: one table for the terminal, for
notebooks and for the dashboard, with six tones for each."""

from __future__ import annotations

STATES: dict[str, str] = {
    state: colour
    for colour, states in {
        "blue": "running joining live",
        "green": "succeeded returned ok",
        "red": "failed lost refused silent problem",
        "amber": "stalled saving warn",
        "violet": "pending joined starting preparing waiting debugging held submitting",
        "grey": "cancelled stopped unknown not_found away missing skipped reading gone planned "
        "idle",
    }.items()
    for state in states.split()
}
TERMINAL = {
    "blue": "cyan",
    "green": "green",
    "red": "red",
    "amber": "yellow",
    "violet": "yellow",
    "grey": "magenta",
}
"""Styles of rich."""
NOTEBOOK = {
    "blue": "59,130,246",
    "green": "34,160,107",
    "red": "229,72,77",
    "amber": "202,138,4",
    "violet": "139,92,246",
    "grey": "139,141,152",
}
"""Tones as red, green, blue, readable on white and on black."""


def rgb(state: str) -> str:
    """Return the notebook's tone of a state as "red,green,blue"."""
    return NOTEBOOK[STATES.get(state, "grey")]


def css() -> str:
    """Return CSS rules that set `--c` to a state's colour, for the dashboard's style sheet."""
    rules = (f".s-{state}{{--c:var(--{colour})}}" for state, colour in STATES.items())
    return "\n".join(rules)
