"""What changes on the pages: all jobs; of one job its hosts, its charts, and what a host prints.

In: looks at jobs. Out: feeds, see `live`. What hosts of a cluster write, another machine writes:
the system does not tell of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._core import layout
from kinetic._dashboard.board_watch import BoardWatch, JobList
from kinetic._dashboard.charts import ChartReader
from kinetic._dashboard.live import EVERY_S, Feed, Message, Seen
from kinetic._dashboard.output import OutputReader
from kinetic._dashboard.scene import JobCamera, JobScene
from kinetic._store.base import pause_after

if TYPE_CHECKING:
    from kinetic._client.access import JobAccess
    from kinetic._core.ref import JobRef

_REMOTE_S = 1.0
_ENDED_S = 2.0
_CHARTS_S = 0.5


class BoardFeed(Feed):
    """All jobs, as a page draws them.

    Args:
        watch: looks at them.
        draw: returns what has changed, if anything has.
    """

    def __init__(self, watch: BoardWatch, draw: Callable[[JobList], Message | None]) -> None:
        self._watch = watch
        self._draw = draw

    def look(self, *, is_told: bool) -> Seen:
        """See `live.Feed`."""
        found = self._watch.look(is_told=is_told)
        within_s = max(self._watch.pause_s(), EVERY_S)
        return Seen(self._draw(found), self._watch.files, within_s, trouble=found.trouble)


class JobFeed(Feed):
    """One job: its head, its slices and hosts, its attempts.

    Args:
        access: to jobs.
        ref: the job.
        render: fills in a template.
    """

    def __init__(self, access: JobAccess, ref: JobRef, render: Callable[..., str]) -> None:
        self._camera = JobCamera(access, ref)
        self._render = render
        self._files = _own_files(access, ref, layout.job(ref.job_id))
        self._usual_s = _usual_pause_s(access)
        self._sent: dict[str, str] = {}

    def close(self) -> None:
        """End the connection to the leader."""
        self._camera.close()

    def look_once(self) -> dict[str, Any]:
        """Return what the page shows at first: no charts, since to read a million steps takes a
        second.

        Raises:
            KineticError: the job cannot be seen.
        """
        scene = self._camera.look()
        return {"scene": scene, "pieces": self._draw(scene) | {"charts": ""}}

    def look(self, *, is_told: bool) -> Seen:
        """See `live.Feed`."""
        scene = self._camera.look()
        before, self._sent = self._sent, self._draw(scene)
        changed = {id: html for id, html in self._sent.items() if before.get(id) != html}
        within_s = _ENDED_S if scene.has_ended else self._usual_s
        return Seen({"html": changed} if changed else None, self._files, within_s)

    def _draw(self, scene: JobScene) -> dict[str, str]:
        """The parts of the page that change, by the ids of their elements."""
        found = {
            name: self._render(f"_{name}.html", scene=scene, ref=scene.ref)
            for name in ("head", "attempts", "attention")
        }
        for box in scene.slices:
            name = f"slice-{box.number}"
            found[name] = self._render("_slice.html", box=box, scene=scene)
        return found


class ChartsFeed(Feed):
    """What one host of a job has logged, as charts."""

    def __init__(
        self, access: JobAccess, ref: JobRef, render: Callable[..., str], host: int
    ) -> None:
        self._reader = ChartReader(access.store, ref, host)
        self._ref = ref
        self._render = render
        self._usual_s = _usual_pause_s(access)

    def look(self, *, is_told: bool) -> Seen:
        """See `live.Feed`."""
        message: Message | None = None
        if self._reader.look():
            drawn = {"charts": self._reader.charts, "left_out": self._reader.left_out}
            message = {"html": {"charts": self._render("_charts.html", ref=self._ref, **drawn)}}
        return Seen(message, within_s=2 * self._usual_s, rest_s=_CHARTS_S)


class OutputFeed(Feed):
    """What one host of a job prints."""

    def __init__(self, access: JobAccess, ref: JobRef, host: int) -> None:
        self._reader = OutputReader(access.handle_of(ref), host)
        self._access = access
        self._ref = ref
        self._host = host
        self._usual_s = _usual_pause_s(access)
        self._open_line = ""
        self._came_at = time.monotonic()

    def look(self, *, is_told: bool) -> Seen:
        """See `live.Feed`."""
        lines, open_line = self._reader.read()
        message: Message | None = None
        if lines or open_line != self._open_line:
            self._came_at, self._open_line = time.monotonic(), open_line
            message = {"lines": [line.to_json() for line in lines], "open": open_line}
        silence_s = time.monotonic() - self._came_at
        within_s = pause_after(silence_s, self._usual_s, 2 * self._usual_s)
        log = layout.log(self._ref.job_id, self._reader.attempt, self._host)
        files = _own_files(self._access, self._ref, layout.log_index(log))
        return Seen(message, files, within_s, has_more=self._reader.is_cut)


def _own_files(access: JobAccess, ref: JobRef, key: str) -> tuple[Path, ...]:
    """The file of a key, if processes of this machine write it."""
    folder = access.store.as_folder()
    return () if folder is None or ref.place.is_cluster else (folder / key,)


def _usual_pause_s(access: JobAccess) -> float:
    return _REMOTE_S if access.store.as_folder() is None else EVERY_S
