"""`kinetic jobs outputs`: the files that functions wrote to their work and output folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from kinetic._client.board import text
from kinetic._core import layout
from kinetic._store import attempts
from kinetic._store.base import Entry, Store
from kinetic._store.many import at_once
from kinetic.cli import output
from kinetic.cli.context import BATCH, AppContext, pass_app
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import job_argument, json_option
from kinetic.errors import UsageError

_HELP = """List the output files of a job or a batch; with --to, fetch them.

Output files are all files that the function wrote to its work folder and to $KINETIC_OUTPUT_DIR.

Paths are relative to the working directory for files of the leader (host 0) in the last attempt.
Files of other hosts and earlier attempts are in `host-N` and `attempt-N`, files written elsewhere
in the project in `project`, and files of $KINETIC_OUTPUT_DIR in `output-dir`.

\b
Examples:
  kinetic jobs outputs job-1a2b
  kinetic jobs outputs --last --to results
  kinetic jobs outputs grp-1a2b --to results      one folder for each input
"""
_FILE_KEY = re.compile(r"jobs/[^/]+/attempts/(\d+)/hosts/(\d+)/files/(.+)", re.DOTALL)


@click.command("outputs", help=_HELP)
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_with("folders"),
    help="Fetch the files into this folder. Existing files are never overwritten.",
)
@json_option
@job_argument("jobs")
@pass_app
def outputs(app: AppContext, /, *, job_id: str, folder: Path | None, as_json: bool) -> None:
    """List or fetch the output files."""
    refs = app.list_batch(job_id) if job_id.startswith(BATCH) else [app.find(job_id)]
    files: dict[str, Entry] = {}
    for ref in refs:
        prefix = f"{ref.group_index}/" if job_id.startswith(BATCH) else ""
        files |= {f"{prefix}{name}": entry for name, entry in _list_files(app.store, ref.job_id)}
        if ref.output_dir and not ref.output_dir.endswith(layout.JobKeys(ref.job_id).outputs):
            output.notice(
                f"The files that {ref.job_id} wrote to $KINETIC_OUTPUT_DIR are in {ref.output_dir}"
                "; this command does not list or fetch them."
            )
    total = text.size(sum(entry.size_bytes for entry in files.values()))
    if not files and not (as_json and folder is None):
        name = job_id if job_id.startswith(BATCH) else refs[0].job_id
        standings = app.board.read_standings(refs).values()
        has_ended = bool(refs) and all(standing.ended_at is not None for standing in standings)
        hint = "" if has_ended else " yet. They are stored when the function ends"
        output.notice(f"{name} has no output files{hint}.")
    elif folder is not None:
        if existing := [name for name in files if (folder / name).exists()]:
            raise UsageError(
                f"{folder / existing[0]} already exists, so nothing was fetched. Choose another "
                "folder."
            )

        def fetch(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            app.store.fetch(files[name].key, folder / name)

        at_once(fetch, [*files], app.store.calls_at_once)
        output.line(f"Fetched {text.count(len(files), 'file')} ({total}) into {folder}.")
    elif as_json:
        output.json_document({name: entry.size_bytes for name, entry in files.items()})
    else:
        rows = [(name, text.size(entry.size_bytes)) for name, entry in files.items()]
        output.table(("FILE", "SIZE"), rows, right=("SIZE",))


def _list_files(store: Store, job_id: str) -> Iterator[tuple[str, Entry]]:
    newest, own = attempts.find_newest(store, job_id), layout.JobKeys(job_id).outputs
    for entry in store.entries(layout.JobKeys(job_id).attempts):
        if match := _FILE_KEY.fullmatch(entry.key):
            attempt, host = int(match[1]), int(match[2])
            place = f"attempt-{attempt}/" * (attempt != newest) + f"host-{host}/" * (host > 0)
            yield f"{place}{match[3]}", entry
    for entry in store.entries(own):
        yield f"output-dir/{entry.key.removeprefix(f'{own}/')}", entry
