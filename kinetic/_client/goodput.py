"""The goodput of one job, from its events and from the metrics of one host."""

from __future__ import annotations

import contextlib
from typing import Any

from kinetic._backends.base import LogRequest
from kinetic._client.board.reader import JobBoard
from kinetic._client.metrics import RowsReader
from kinetic._core.gang.picture import GangPicture
from kinetic._core.goodput import Goodput, Span, add_up, divide, spans_of
from kinetic._core.plan import Cost
from kinetic._core.ref import JobRef
from kinetic.errors import KineticError


class GoodputReader:
    """Reads how the time of a job was used. Each read takes only the metrics that are new.

    Attributes:
        cost: the price of the job; None if it is unknown.
        attempts: the goodput of each attempt at the last read, oldest first.
    """

    def __init__(self, board: JobBoard, ref: JobRef) -> None:
        self._board = board
        self._ref = ref
        self.cost: Cost | None = None
        # The hosts of a gang take their steps together: one of them is enough.
        self._rows = RowsReader(
            board.store, ref, LogRequest(hosts=(0,), follow=False, metrics=True)
        )
        self._spans: dict[int, list[Span]] = {}
        self.attempts: list[Goodput] = []

    def read(self, gang: GangPicture, until: float) -> None:
        """Compute how the time of each attempt was used. Metrics that cannot be read are left out.

        Args:
            gang: the job's attempts and their hosts.
            until: the time now, or the end of the job, in seconds since the epoch.
        """
        with contextlib.suppress(KineticError):
            for chunk, parts in self._rows.read():
                spans = self._spans.setdefault(chunk.end.attempt, [])
                spans += (span for rows in parts for span in spans_of(rows))
        plan = self._board.plan(self._ref)
        self.cost = None if plan is None else plan.cost
        slices = 1 if plan is None else plan.options.most_slices
        self.attempts = divide(
            gang, self._spans, slices=slices, created_at=self._ref.created_at, until=until
        )

    def describe(self) -> str:
        """Return for users how the job's time was used; "" if no steps are recorded."""
        return add_up(self.attempts).describe(self.cost)

    def to_json(self) -> dict[str, Any]:
        """Return the goodput of the job and of each attempt as a JSON object."""
        return add_up(self.attempts).to_json(self.cost) | {
            "attempts": [attempt.to_json(self.cost) for attempt in self.attempts]
        }
