"""The call of a job for its page: its options, its data, its source, and the compiler's report.

Values of environment variables are hidden, because they may be secrets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinetic._client.board import text
from kinetic._client.plan_view import describe_plan
from kinetic._core import layout
from kinetic._store.base import is_near
from kinetic.errors import NotFound

if TYPE_CHECKING:
    from kinetic._core.plan import Plan
    from kinetic._core.ref import JobRef
    from kinetic._store.base import Store

_MOST_FILES = 5000
_NAMES_ONLY = ("env", "topology")


def describe_call(plan: Plan) -> dict[str, Any]:
    """Return facts about the call, and those options that differ from their defaults."""
    options = [
        (name, _format_value(value))
        for name, value in plan.options.to_json().items()
        if name not in _NAMES_ONLY
    ]
    limits = [(name, _format_value(value)) for name, value in vars(plan.limits).items() if value]
    return {"facts": _facts(plan), "options": options, "limits": limits}


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value))
    return text.printable(value)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    more = {
        "labels": ", ".join(f"{name}={value}" for name, value in plan.labels.items()),
        "output folder": plan.output_dir or "",
        "versions": f"Python {plan.versions.python}, kinetic {plan.versions.kinetic}",
    }
    return [
        (name.capitalize(), text.printable(value))
        for name, value in [*describe_plan(plan), *more.items()]
        if value
    ]


def has_compile_report(store: Store, ref: JobRef) -> bool:
    """True if the job has a report of the TPU compiler. Only jobs on this machine can have one."""
    return is_near(store) and store.has(layout.JobKeys(ref.job_id).compile_report)


def describe_compile(store: Store, ref: JobRef) -> str:
    """Return the TPU compiler's report about a job's programs as text.

    Raises:
        NotFound: the job has no report.
        KineticError: the report cannot be read.
    """
    from kinetic._compile.checked import CheckReport

    return str(CheckReport.read(store.get(layout.JobKeys(ref.job_id).compile_report)))


def list_source(store: Store, plan: Plan) -> tuple[list[tuple[str, str]], int]:
    """Return the first files of the source tree with their sizes, and the number of further files.

    Raises:
        NotFound: no source was sent.
        KineticError: the tree cannot be read.
    """
    from kinetic._source import manifest
    from kinetic._source.download import open_tree

    if plan.tree is None:
        raise NotFound("No source was sent with this job.")
    with open_tree(store, plan.tree) as stored:
        files = [
            (text.printable(entry.path), text.size(entry.size_bytes))
            for entry in stored.entries
            if isinstance(entry, manifest.File)
        ]
    return files[:_MOST_FILES], max(len(files) - _MOST_FILES, 0)
