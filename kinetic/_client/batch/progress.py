"""The progress of a batch on stderr: one line that is redrawn on a terminal, elsewhere a line for
each input that ends. Errors of the stream are ignored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from kinetic._client import notebook
from kinetic._client.batch.inputs import InputState
from kinetic._client.batch.run import BatchView
from kinetic._client.board import console

DRAW_EVERY_S = 0.1
BAR_WIDTH = 24


def stream_for(progress: bool) -> TextIO | None:
    """Return stderr; None if progress is switched off, or a notebook draws it."""
    return None if not progress or notebook.kernel_shell() is not None else sys.stderr


def progress_line(view: BatchView) -> str:
    """Return the numbers of ended, failed, skipped and running inputs as text."""
    counts = view.counts()
    failed = sum(
        counts.get(state, 0)
        for state in (InputState.FAILED, InputState.REFUSED, InputState.REMOVED)
    )
    parts = [f"{len(view.finished)}/{len(view.states)}"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{counts[InputState.SKIPPED]} left out"] if InputState.SKIPPED in counts else []
    sessions = [job.ref.place.session for job in view.list_running()]
    # A session runs one call at a time: the others wait in its queue.
    running = sessions.count("") + len({*sessions} - {""})
    parts += [f"{running} running"] if running else []
    return f"{view.records.batch.group_id} {', '.join(parts)}"


def bar(done: int, total: int) -> str:
    """Return a progress bar as text."""
    full = BAR_WIDTH if not total else BAR_WIDTH * done // total
    return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}]"


class BatchProgress:
    """The progress of a batch during one wait."""

    def __init__(self, view: BatchView, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._view = view
        self._stream = stream
        self._clock = clock
        self._drawn = False
        self._draw_at = 0.0
        self._redraws = console.can_redraw(stream)

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._drawn:
            self._draw()
            self._write("\n")

    def show_end(self, index: int) -> None:
        """Show that an input has ended; on a terminal, redraw the line at most every 0.1 s."""
        if self._stream is None:
            return
        if not self._redraws:
            with self._view.changes:
                state, line = self._view.states[index], progress_line(self._view)
            # Hundreds of inputs may be skipped at once: only count them in the lines of others.
            if state is not InputState.SKIPPED:
                self._write(f"kinetic: {line}; input {index} {state}\n")
        elif self._clock() >= self._draw_at:
            self._draw()

    def show_wait(self) -> None:
        """Redraw the line on a terminal before the caller waits."""
        if self._stream is not None and self._redraws:
            self._draw()

    def _draw(self) -> None:
        self._drawn = True
        self._draw_at = self._clock() + DRAW_EVERY_S
        with self._view.changes:
            done, total = len(self._view.finished), len(self._view.states)
            line = progress_line(self._view)
        # Switch off wrapping: the second row of a wrapped line could not be redrawn.
        self._write(f"\033[?7l\rkinetic: {line} {bar(done, total)}\033[K\033[?7h")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed.
            self._stream = None
