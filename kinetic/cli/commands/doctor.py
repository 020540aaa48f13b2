"""`kinetic doctor`: whether this machine or a cluster can run jobs, and what they left behind.

Out: findings as a table or JSON; exit code 1 if one is a problem.
"""

from __future__ import annotations

import click

from kinetic.cli import exit_codes, output
from kinetic.cli.options import json_option

_COLUMNS = ("", "CHECK", "FOUND")

_HELP = """Check whether this machine can run jobs, and look for what they left behind.

Looks at Python, JAX and Keras, processors, memory, namespaces, settings and profiles, the store and
its records, processes and files of jobs that were killed, and starts the process that starts hosts.
If a cluster is configured, also checks whether it answers, what is installed there, your
permissions, its node pools, and whether the store can be written and read.
Exits with 1 if there is a problem.

\b
Examples:
  kinetic doctor
  kinetic doctor --json | jq '.findings[] | select(.level != "ok")'
"""


@click.command(
    "doctor",
    help=_HELP,
    short_help="Check this machine and the cluster.",
)
@json_option
def doctor(as_json: bool) -> int:
    """Print what was found."""
    from kinetic._client.doctor.examination import examine

    report = examine()
    if as_json:
        output.json_document(report.to_json())
    else:
        rows = [
            (str(f.level), f.check, f.detail + (f" To do: {f.remedy}" if f.remedy else ""))
            for f in report.findings
        ]
        output.table(_COLUMNS, rows, wrap="FOUND")
    return exit_codes.OK if report.ok else exit_codes.FAILED
