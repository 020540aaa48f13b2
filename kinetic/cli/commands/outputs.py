"""`kinetic jobs outputs`: the files that functions have left in their work and output folders.

In: the id of a job or a batch. Out: a table, or copies of the files.
"""

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

_HELP = """List the files that a function wrote into its work folder, which are kept, and into
$KINETIC_OUTPUT_DIR; with --to, fetch them. Takes the id of a batch, too.

Files of the leader in the last attempt have their names in its working directory; those of others
are below `host-N` and `attempt-N`, those elsewhere in the project below `project`, and those of
$KINETIC_OUTPUT_DIR below `output-dir`.

\b
Examples:
  kinetic jobs outputs job-1a2b
  kinetic jobs outputs --last --to results
  kinetic jobs outputs grp-1a2b --to results      a folder for each input
"""
_KEPT = re.compile(r"jobs/[^/]+/attempts/(\d+)/hosts/(\d+)/files/(.+)", re.DOTALL)


@click.command("outputs", help=_HELP)
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_with("folders"),
    help="Fetch the files into this folder; none that exists there is overwritten.",
)
@json_option
@job_argument("jobs")
@pass_app
def outputs(app: AppContext, /, *, job_id: str, folder: Path | None, as_json: bool) -> None:
    """List or fetch."""
    refs = app.list_batch(job_id) if job_id.startswith(BATCH) else [app.find(job_id)]
    files: dict[str, Entry] = {}
    for ref in refs:
        prefix = f"{ref.group_index}/" if job_id.startswith(BATCH) else ""
        files |= {f"{prefix}{name}": entry for name, entry in _list_files(app.store, ref.job_id)}
        if ref.output_dir and not ref.output_dir.endswith(layout.JobKeys(ref.job_id).outputs):
            output.notice(f"$KINETIC_OUTPUT_DIR of {ref.job_id} is {ref.output_dir}.")
    total = text.size(sum(entry.size_bytes for entry in files.values()))
    if folder is not None:
        if existing := [name for name in files if (folder / name).exists()]:
            raise UsageError(f"{folder / existing[0]} exists. Nothing was fetched: name a new DIR.")

        def fetch(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            app.store.fetch(files[name].key, folder / name)

        at_once(fetch, [*files], app.store.calls_at_once)
        output.line(f"Fetched {text.count(len(files), 'file')} ({total}) into {folder}.")
    elif as_json:
        output.json_document({name: entry.size_bytes for name, entry in files.items()})
    elif not files:
        name = job_id if job_id.startswith(BATCH) else refs[0].job_id
        output.notice(f"{name} has left no files. They are kept when the function has ended.")
    else:
        rows = [(name, text.size(entry.size_bytes)) for name, entry in files.items()]
        output.table(("FILE", "SIZE"), rows, right=("SIZE",))


def _list_files(store: Store, job_id: str) -> Iterator[tuple[str, Entry]]:
    newest, own = attempts.newest(store, job_id), layout.JobKeys(job_id).outputs
    for entry in store.entries(layout.JobKeys(job_id).attempts):
        if match := _KEPT.fullmatch(entry.key):
            attempt, host = int(match[1]), int(match[2])
            place = f"attempt-{attempt}/" * (attempt != newest) + f"host-{host}/" * (host > 0)
            yield f"{place}{match[3]}", entry
    for entry in store.entries(own):
        yield f"output-dir/{entry.key.removeprefix(f'{own}/')}", entry
