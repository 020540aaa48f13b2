"""`kinetic doctor`: whether this machine or a cluster can run jobs, and what they left behind.

In: whether to tidy up. Out: findings as a table or JSON; exit code 1 if one is a problem.
"""

from __future__ import annotations

import click

from kinetic._client.board import text
from kinetic.cli import exit_codes, output
from kinetic.cli.options import json_option

_COLUMNS = ("", "CHECK", "FOUND")

_HELP = """Check whether this machine can run jobs, and look for what they left behind.

Looks at Python, JAX and Keras, processors, memory, namespaces, settings and profiles, the store and
its records, processes and files of jobs that were killed, and starts the process that starts hosts.
If a cluster is configured, also checks whether it answers, what is installed there, your
permissions, its node pools, and whether the store can be written and read.
Exits with 1 if there is a problem.

With --fix it does only what is safe: it judges jobs whose supervisor was killed, and removes their
temporary files.

\b
Examples:
  kinetic doctor
  kinetic doctor --fix
  kinetic doctor --json | jq '.findings[] | select(.level != "ok")'
"""


@click.command(
    "doctor",
    help=_HELP,
    short_help="Check this machine and the cluster, and tidy up after jobs.",
)
@click.option("--fix", is_flag=True, help="Judge orphaned jobs and remove stale temporary files.")
@json_option
def doctor(fix: bool, as_json: bool) -> int:
    """Print what was found."""
    from kinetic._client.doctor.examination import examine

    report = examine(fix=fix)
    if as_json:
        output.json_document(report.to_json())
    else:
        for action in report.done:
            output.line(text.printable(action))
        rows = [
            (str(f.level), f.check, f.detail + (f" To do: {f.remedy}" if f.remedy else ""))
            for f in report.findings
        ]
        output.table(_COLUMNS, rows, wrap="FOUND")
        if not fix and any(f.fixable for f in report.findings):
            output.notice("`kinetic doctor --fix` does what can be done safely.")
    return exit_codes.OK if report.ok else exit_codes.FAILED
