"""`kinetic doctor`: checks of this machine and the cluster, and of leftovers of jobs.

The exit code is 1 if a finding is a problem.
"""

from __future__ import annotations

import click

from kinetic.cli import exit_codes, output
from kinetic.cli.options import json_option

_COLUMNS = ("", "CHECK", "RESULT")

_HELP = """Check this machine and the configured cluster, and report leftovers of jobs.

On this machine, check Python, JAX and Keras, processors, memory, namespaces, settings, profiles,
the store and its records, leftover processes and files of killed jobs, and that hosts can start.
If a cluster is configured, also check that it answers, the software installed on it, your
permissions, its node pools, and that the store can be written and read.
Exit with 1 if there is a problem.

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
    """Print the findings."""
    from kinetic._client.doctor.examination import examine

    report = examine()
    if as_json:
        output.json_document(report.to_json())
    else:
        rows = [
            (str(f.level), f.check, f.detail + (f" To do: {f.remedy}" if f.remedy else ""))
            for f in report.findings
        ]
        output.table(_COLUMNS, rows, wrap="RESULT")
    return exit_codes.OK if report.ok else exit_codes.FAILED
