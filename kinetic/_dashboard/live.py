"""What changes while a page is looked at: one stream of events for each page.

In: looks at jobs. Out: messages as server-sent events: pieces of HTML by the id of their element,
lines of output, and what is in the way.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kinetic._dashboard.charts import ChartReader
from kinetic._dashboard.output import OutputReader
from kinetic._dashboard.scene import JobCamera, JobScene
from kinetic.errors import KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._client.access import JobAccess
    from kinetic._core.ref import JobRef

Message = dict[str, Any]

EVERY_S = 0.1
"""Between two looks at what a page shows: half of it is the usual delay."""
_SILENT_S = 5.0
"""Without an answer for this long, a page says so."""
_NOTICE_S = 0.5
"""A page that is closed, or a server that ends, is noticed after this time at most."""
_ALIVE_S = 15.0
"""A stream without news says at least this often that it is there."""
_REMOTE_S = 1.0
_ENDED_S = 2.0
_LOOKS = ThreadPoolExecutor(64, thread_name_prefix="kinetic-dashboard-look")
"""Not the loop's own, whose end waits for all: a store that hangs must not keep Ctrl-C waiting."""


async def send_messages(
    look: Callable[[], Message | None],
    close: Callable[[], object],
    is_over: Callable[[], Awaitable[bool]],
) -> AsyncIterator[bytes]:
    """Yield what each look finds, as events, until the browser has left, the server ends, or what
    is looked at is gone. `look` runs in a thread, one at a time; one that fails, or does not come
    back, is told of."""
    told_at, since, failed = time.monotonic(), time.monotonic(), ""
    loop = asyncio.get_running_loop()
    task: asyncio.Future[Message | None] | None = None
    try:
        while not await is_over():
            if task is None:
                since = time.monotonic()
                task = loop.run_in_executor(_LOOKS, look)
            done, _ = await asyncio.wait({task}, timeout=_NOTICE_S)
            message: Message | None = None
            if not done:
                waited_s = time.monotonic() - since
                if waited_s > _SILENT_S:
                    message = {"trouble": f"The store has not answered for {waited_s:.0f} s."}
            else:
                (message, failed), task = _take_look(task, failed), None
            if message is not None:
                told_at = time.monotonic()
                yield f"data: {json.dumps(message)}\n\n".encode()
                if message.get("end"):
                    return
            elif time.monotonic() - told_at > _ALIVE_S:
                told_at = time.monotonic()
                yield b": there\n\n"
            if done:
                await asyncio.sleep(_NOTICE_S if failed else EVERY_S)
    finally:
        if task is None:
            close()
        else:  # It may take long, and nobody waits for it any more.
            task.add_done_callback(lambda _: close())


def _take_look(
    ended: asyncio.Future[Message | None], failed_before: str
) -> tuple[Message | None, str]:
    """Return what a look found, and why it failed, "" if it did not."""
    message, failed = None, ""
    try:
        message = ended.result()
    except NotFound as error:
        message = {"trouble": str(error), "end": True}
    except (KineticError, OSError) as error:
        failed = str(error)
    if failed != failed_before:
        message = {"trouble": failed} | (message or {})
    return message, failed


class JobStream:
    """The page of one job, from its first look on.

    Args:
        access: to jobs.
        ref: the job.
        render: fills in a template.
        host: whose output is read.
    """

    def __init__(
        self,
        access: JobAccess,
        ref: JobRef,
        render: Callable[..., str],
        *,
        host: int = 0,
    ) -> None:
        self._camera = JobCamera(access, ref)
        self._ref = ref
        self._render = render
        host = min(host, ref.hosts - 1)
        self._reader = OutputReader(access.handle_of(ref), host)
        self._charts = ChartReader(access.store, ref, host)
        self._is_near = access.store.as_folder() is not None
        self._sent: dict[str, str] = {}
        self._open_line = ""
        self._trouble = ""
        self._next_at = 0.0

    def close(self) -> None:
        """Let go of the job."""
        self._camera.close()

    def look_once(self) -> dict[str, Any]:
        """Return what the page shows at first: no charts, since to read a million steps takes a
        second.

        Raises:
            KineticError: the job cannot be seen.
        """
        scene = self._camera.look()
        return {"scene": scene, "pieces": self._pieces(scene) | {"charts": ""}}

    def look(self) -> Message | None:
        """Return what has changed; None if nothing has, or it is not yet time to look again.

        Raises:
            NotFound: its records were removed.
        """
        if time.monotonic() < self._next_at:
            return None
        message: Message = {}
        try:
            scene = self._camera.look()
            html, has_charts = self._pieces(scene), bool(self._sent)
            if has_charts:
                html["charts"] = self._draw_charts()
            changed = {n: piece for n, piece in html.items() if self._sent.get(n) != piece}
            if changed:
                message["html"] = changed
                self._sent = html
            lines, open_line = self._reader.read()
            if lines or open_line != self._open_line:
                message |= {"lines": [line.to_json() for line in lines], "open": open_line}
                self._open_line = open_line
            pause_s = _ENDED_S if scene.has_ended else 0.0 if self._is_near else _REMOTE_S
            self._next_at = time.monotonic() + (pause_s if has_charts and not lines else 0.0)
            trouble = ""
        except NotFound:
            raise
        except (KineticError, OSError) as error:
            trouble = str(error)
            self._next_at = time.monotonic() + _ENDED_S
        if trouble != self._trouble:
            self._trouble = message["trouble"] = trouble
        return message or None

    def _draw_charts(self) -> str:
        charts = self._charts.look()
        left_out = self._charts.left_out
        return self._render("_charts.html", charts=charts, left_out=left_out, ref=self._ref)

    def _pieces(self, scene: JobScene) -> dict[str, str]:
        """The parts of the page that change, by the ids of their elements, but for the charts."""
        found = {
            name: self._render(f"_{name}.html", scene=scene, ref=scene.ref)
            for name in ("head", "attempts", "attention")
        }
        for box in scene.slices:
            name = f"slice-{box.number}"
            found[name] = self._render("_slice.html", box=box, scene=scene)
        return found
