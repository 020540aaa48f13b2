"""Batches and the states of their inputs.

If an input has several jobs, its state is that of the latest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from kinetic._client.batch.inputs import InputState, inputs_of
from kinetic._client.batch.records import SUBMITTER_ENDED, BatchRecords, SubmitterWatch
from kinetic._client.board import text
from kinetic.errors import KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._client.board.spending import SpendingWatch
    from kinetic._dashboard.board_watch import JobList, JobRow
    from kinetic._store.base import Store

_MOST_BATCHES = 200


class BatchCell(NamedTuple):
    """One input: its state, its latest job, and its number of jobs."""

    number: int
    state: str
    row: JobRow | None
    tries: int
    reason: str


class BatchGrid(NamedTuple):
    """One batch.

    Attributes:
        group_id: the batch's id.
        name: the batch's display name.
        created_at: when the first job was created, in seconds since the epoch; 0.0 without jobs.
        cells: the inputs.
        stopped: reason why the batch was stopped early; "" if it was not.
        cost: the cost of all jobs, formatted; "" if unknown.
    """

    group_id: str
    name: str
    created_at: float
    cells: tuple[BatchCell, ...]
    stopped: str = ""
    cost: str = ""

    def counts(self) -> dict[str, int]:
        """Return the number of inputs in each state, the most frequent state first."""
        return dict(Counter(cell.state for cell in self.cells).most_common())


def list_batches(store: Store, jobs: JobList) -> list[BatchGrid]:
    """Return the newest batches that have jobs. Inputs without a job are left out."""
    by_group: dict[str, list[JobRow]] = {}
    for row in jobs.rows:
        if row.ref.group_id:
            by_group.setdefault(row.ref.group_id, []).append(row)
    return [
        BatchGrid(group_id, _name_of(store, group_id), rows[-1].ref.created_at, _cells(rows))
        for group_id, rows in list(by_group.items())[:_MOST_BATCHES]
    ]


def read_batch(
    store: Store, group_id: str, all_jobs: JobList, spending: SpendingWatch
) -> BatchGrid:
    """Return one batch with all its inputs.

    Raises:
        NotFound: the batch does not exist.
    """
    rows = [row for row in all_jobs.rows if row.ref.group_id == group_id]
    jobs = [(row.ref, row.standing._replace(started_at=row.started_at)) for row in rows]
    cost = spending.read(jobs).describe() if jobs else ""
    try:
        records = BatchRecords.open(store, group_id)
    except NotFound:
        if not rows:
            raise
        return BatchGrid(group_id, group_id, rows[-1].ref.created_at, _cells(rows), cost=cost)
    cells = {cell.number: cell for cell in _cells(rows)}
    reading, total = records.read(SubmitterWatch(), cells), records.batch.total
    states = inputs_of(
        total,
        {*cells, *reading.refs},
        reading.refusals,
        reading.end,
        is_abandoned=reading.is_abandoned,
    )
    for index, state in enumerate(states):
        why = reading.refusals.get(index, SUBMITTER_ENDED) if state is InputState.REFUSED else ""
        # A job that is not in the list of jobs yet counts as waiting.
        name = InputState.WAITING if state is InputState.LIVE else state
        cells.setdefault(index, BatchCell(index, str(name), None, 0, text.printable(why)))
    first = rows[-1].ref.created_at if rows else 0.0
    ordered = tuple(cells[index] for index in sorted(cells))
    title = records.batch.name or group_id
    return BatchGrid(
        group_id, title, first, ordered, reading.end.stopped if reading.end else "", cost
    )


def _name_of(store: Store, group_id: str) -> str:
    try:
        return BatchRecords.open(store, group_id).batch.name or group_id
    except KineticError:  # Without a readable record, show the id.
        return group_id


def _cells(rows: Iterable[JobRow]) -> tuple[BatchCell, ...]:
    """Return the inputs that have jobs. Rows are sorted newest first, so the first row of an input
    is the input's latest job."""
    cells: dict[int, BatchCell] = {}
    for row in rows:
        index = row.ref.group_index or 0
        latest = cells.get(index)
        if latest is None:
            cells[index] = BatchCell(index, row.state, row, 1, row.standing.reason)
        else:
            cells[index] = latest._replace(tries=latest.tries + 1)
    return tuple(cells[index] for index in sorted(cells))
