"""The dashboard's pages and the requests of their script: routes and rendered templates.

Templates escape all values. While a page is open, its changes arrive as pieces of HTML in one
stream of events (`live`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Environment, PackageLoader
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kinetic._client import killing
from kinetic._client.board import colours, shape, text
from kinetic._client.board.spending import SpendingWatch
from kinetic._client.futures import run_in_thread
from kinetic._core.gang import blame
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._dashboard import capacity, output
from kinetic._dashboard.batches import BatchGrid, list_batches, read_batch
from kinetic._dashboard.board_watch import BoardWatch, JobList
from kinetic._dashboard.call import (
    describe_call,
    describe_compile,
    has_compile_report,
    list_source,
)
from kinetic._dashboard.charts import ChartReader
from kinetic._dashboard.live import Message, Source, format_event, stream_events
from kinetic._dashboard.output import OutputReader
from kinetic._dashboard.scene import JobCamera, JobScene
from kinetic._dashboard.session_line import MOST_ROWS, draw_line
from kinetic._store.base import is_near
from kinetic.errors import KineticError, NotFound, UsageError
from kinetic.version import __version__

if TYPE_CHECKING:
    from starlette.requests import Request

    from kinetic._client.access import JobAccess

_STATES = [
    *(str(state).lower() for state in JobStatus if state is not JobStatus.NOT_FOUND),
    "unknown",
]
_WINDOW = 100
_CHECK_S = 0.25
"""Seconds between checks that the browser still waits for a search."""
_COST_EVERY_S = 5.0
"""Seconds between updates of the cost of running jobs if nothing else changes."""
_FIRST_WINDOW = 40
"""Number of rows in the page itself. The script fetches further rows as they come into view."""
_SCRIPT = "dashboard.js"
_NOT_FOUND = 404
_EVENTS = "text/event-stream"
_OUTPUT_S, _JOB_S, _CHARTS_S = 0.2, 0.5, 1.0
"""Seconds between reads of a job's output, its hosts and its metrics."""
_REMOTE_S = 1.0
"""Minimum seconds between reads of a remote store."""

Act = Callable[["Request", JobRef], dict[str, Any]]
T = TypeVar("T")


def make_app(access: JobAccess, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application, to be protected by `guard.Guard`. Streams end on `is_ending()`."""
    pages = Pages(access, is_ending)
    script = _read_static(_SCRIPT)

    async def send_script(request: Request) -> Response:
        return Response(script, media_type="text/javascript")

    def show(path: str, answer: Callable[[Request], Response]) -> Route:
        async def answer_from_thread(request: Request) -> Response:
            return await _in_thread(answer, request)

        return Route(path, answer_from_thread)

    actions: dict[str, Act] = {"cancel": pages.cancel, "kill": pages.kill, "stacks": pages.stacks}
    job = "/jobs/{job_id}"
    return Starlette(
        routes=[
            show("/", pages.show_jobs),
            show("/rows", pages.show_rows),
            Route("/live", pages.stream_jobs),
            show(job, pages.show_job),
            Route(f"{job}/live", pages.stream_job),
            Route(f"{job}/search", pages.search_output),
            show(f"{job}/output", pages.download_output),
            show(f"{job}/call", pages.show_call),
            show(f"{job}/compile", pages.show_compile),
            show(f"{job}/explain", pages.show_explanation),
            show(f"{job}/source", pages.show_source),
            *(
                Route(f"{job}/{name}", pages.act(act), methods=["POST"])
                for name, act in actions.items()
            ),
            show("/batches", pages.show_batches),
            show("/batches/{group_id}", pages.show_batch),
            Route("/batches/{group_id}/live", pages.stream_batch),
            show("/capacity", pages.show_capacity),
            show("/capacity/table", pages.show_capacity_table),
            Route(f"/static/{_SCRIPT}", send_script),
        ],
        exception_handlers={KineticError: pages.explain},
    )


def read_style() -> str:
    """Return the style sheet, which is a part of each page: otherwise the browser would need a
    second request before it can paint."""
    return f"{_read_static('dashboard.css')}{colours.css()}\n"


def _read_static(name: str) -> str:
    return (resources.files("kinetic._dashboard") / "static" / name).read_text()


class Pages:
    """The request handlers of all routes."""

    def __init__(self, access: JobAccess, is_ending: Callable[[], bool]) -> None:
        self._access = access
        self._is_ending = is_ending
        self._watch = BoardWatch(access)
        self._spending = SpendingWatch(access.board)
        self._templates = Environment(
            loader=PackageLoader("kinetic._dashboard"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.globals |= {
            "version": __version__,
            "states": _STATES,
            "style": read_style(),
        }
        self._templates.filters |= {
            "size": text.size,
            "name_of": text.printable,
            "count": text.count,
            "duration": text.duration,
        }

    def render(self, template: str, **values: Any) -> str:
        """Render a template. Characters that cannot be encoded in UTF-8 become "?"."""
        filled_in = self._templates.get_template(template).render(**values)
        return filled_in.encode(errors="replace").decode()

    # -- the list of jobs --------------------------------------------------------------------------

    def show_jobs(self, request: Request) -> Response:
        """Show the list of jobs: the first rows, and space for rows that the script fetches."""
        jobs = self._watch.read(patience_s=1.0)
        rows = jobs.select(*_filter_of(request))
        return self._page(
            request,
            "jobs.html",
            rows=rows[:_FIRST_WINDOW],
            total=len(rows),
            jobs=jobs,
            **self._head_of(jobs),
        )

    def show_rows(self, request: Request) -> Response:
        """Return the rows of a part of the job list, and the number of all rows."""
        jobs = self._watch.read()
        rows = jobs.select(*_filter_of(request))
        first = _number(request, "from", 0)
        window = rows[first : first + min(_number(request, "n", _WINDOW), 4 * _WINDOW)]
        html = self.render("_rows.html", rows=window, first=first, jobs=jobs)
        return JSONResponse({"total": len(rows), "first": first, "html": html})

    async def stream_jobs(self, request: Request) -> Response:
        """Stream changes of the list."""
        version = -1

        def poll() -> Message:
            nonlocal version
            jobs = self._watch.read()
            message: Message = {"trouble": jobs.trouble}
            if jobs.version != version:
                version = jobs.version
                counts = self.render("_counts.html", **self._head_of(jobs))
                message |= {"html": {"counts": counts}, "changed": True}
            return message

        return self._stream(request, Source(poll, self._watch.every_s))

    def _head_of(self, jobs: JobList) -> dict[str, Any]:
        return {"counts": jobs.counts(), "all": len(jobs.rows), "trouble": jobs.trouble}

    # -- one job -----------------------------------------------------------------------------------

    def show_job(self, request: Request) -> Response:
        """Show one job; its charts follow later, as reading a million steps takes a second."""
        ref = self._find(request)
        camera = JobCamera(self._access, ref, divides=False)
        try:
            scene = camera.read()
        finally:
            camera.close()
        return self._page(
            request,
            "session.html" if ref.session_name else "job.html",
            ref=ref,
            scene=scene,
            pieces=self._draw_job(scene),
            is_compiled=has_compile_report(self._access.store, ref),
        )

    async def stream_job(self, request: Request) -> Response:
        """Stream changes of a job's page, and the output of one of its hosts."""
        ref = await _in_thread(self._find, request)
        host = min(_number(request, "host", 0), ref.hosts - 1)
        return self._stream(request, *self.make_sources(ref, host))

    def make_sources(self, ref: JobRef, host: int) -> tuple[Source, Source, Source]:
        """Return the sources of a job's page: a host's output, the job, its charts."""
        camera = JobCamera(self._access, ref)
        charts = ChartReader(self._access.store, ref, host)
        printed = OutputReader(self._access.handle_of(ref), host)
        least_s = _REMOTE_S if not is_near(self._access.store) else 0.0
        pieces: dict[str, str] = {}
        open_line = ""

        def read_output() -> Message | None:
            nonlocal open_line
            lines, begun = printed.read()
            if not lines and begun == open_line:
                return None
            open_line = begun
            return {"lines": [line.to_json() for line in lines], "open": open_line}

        def read_job() -> Message | None:
            nonlocal pieces
            before, pieces = pieces, self._draw_job(camera.read())
            changed = {id: html for id, html in pieces.items() if before.get(id) != html}
            return {"html": changed} if changed else None

        def read_charts() -> Message | None:
            drawn = [
                (chart.name, self.render("_chart.html", chart=chart), chart.points)
                for chart in charts.draw_changed()
            ]
            return {"charts": drawn} if drawn else None

        return (
            Source(read_output, max(_OUTPUT_S, least_s)),
            Source(read_job, max(_JOB_S, least_s), camera.close),
            Source(read_charts, max(_CHARTS_S, least_s)),
        )

    def _draw_job(self, scene: JobScene) -> dict[str, str]:
        """Render the changing parts of the page, by the ids of their elements."""
        ref, values = scene.ref, dict[str, Any](scene=scene, ref=scene.ref)
        if ref.session_name or ref.place.session:
            values["jobs"] = jobs = self._watch.read(patience_s=1.0)
            if ref.session_name:
                values |= self._read_line(scene, jobs)
        names = ("head", "attention", "calls" if ref.session_name else "attempts")
        pieces = {name: self.render(f"_{name}.html", **values) for name in names}
        for box in scene.slices:
            pieces[f"slice-{box.number}"] = self.render("_slice.html", box=box, scene=scene)
        return pieces

    def _read_line(self, scene: JobScene, jobs: JobList) -> dict[str, Any]:
        """Return a session's calls on the time line, and when the session ends by itself."""
        until = scene.standing.ended_at or self._access.now()
        calls = [row for row in jobs.rows if row.ref.place.session == scene.ref.job_id]
        line = draw_line(calls, scene.started_at or until, until)
        plan, ends_at = self._access.board.plan(scene.ref), None
        if plan is not None and plan.holds is not None and scene.started_at and not scene.has_ended:
            budget_s = plan.limits.budget_s
            ends_at = plan.holds.ends_at(scene.started_at, line.idle_since, budget_s)
        return {"line": line, "rows": calls[:MOST_ROWS], "ends_at": ends_at}

    async def search_output(self, request: Request) -> Response:
        """Return the matching lines of one host or all hosts. Stop the search when the browser
        closes the request, as it does when the user changes the words."""
        is_abandoned = threading.Event()
        searching = asyncio.ensure_future(_in_thread(self._search, request, is_abandoned))
        while not searching.done():
            await asyncio.wait([searching], timeout=_CHECK_S)
            if await request.is_disconnected():
                is_abandoned.set()
        return await searching

    def _search(self, request: Request, is_abandoned: threading.Event) -> Response:
        ref = self._find(request)
        words = request.query_params.get("q", "")
        host = request.query_params.get("host", "0")
        if not words:
            return JSONResponse({"lines": [], "cut": False, "size": ""})
        chosen = None if host == "all" else shape.check_host(ref, _number(request, "host", 0))
        handle = self._access.handle_of(ref)
        hits = output.search(handle, chosen, words, is_wanted=lambda: not is_abandoned.is_set())
        return JSONResponse(
            {
                "lines": [line.to_json() for line in hits.lines],
                "cut": hits.is_cut,
                "size": text.size(hits.size_bytes),
            }
        )

    def download_output(self, request: Request) -> Response:
        """Send all output of a host as a file."""
        from kinetic._backends.base import LogRequest

        ref = self._find(request)
        host = shape.check_host(ref, _number(request, "host", 0))
        chunks = self._access.handle_of(ref).chunks(LogRequest(hosts=(host,), follow=False))
        name = f"{ref.job_id}-host-{host}.log"
        pieces = (chunk.data for chunk in chunks if chunk is not None and chunk.data)

        async def send() -> AsyncIterator[bytes]:
            while piece := await _in_thread(next, pieces, b""):
                yield piece

        return StreamingResponse(
            send(),
            media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    def show_call(self, request: Request) -> Response:
        """Show the call: its options, data and versions."""
        plan = self._access.board.read_plan(self._find(request))
        return HTMLResponse(self.render("_call.html", **describe_call(plan)))

    def show_compile(self, request: Request) -> Response:
        """Return the TPU compiler's report about the job's programs."""
        report = describe_compile(self._access.store, self._find(request))
        return JSONResponse({"text": text.printable_lines(report)})

    def show_explanation(self, request: Request) -> Response:
        """Return the page of `kinetic jobs explain`."""
        handle = self._access.handle_of(self._find(request))
        return JSONResponse({"text": str(handle.explain())})

    def show_source(self, request: Request) -> Response:
        """List the files that were sent."""
        plan = self._access.board.read_plan(self._find(request))
        files, more = list_source(self._access.store, plan)
        return HTMLResponse(self.render("_source.html", files=files, more=more))

    # -- actions -----------------------------------------------------------------------------------

    def act(self, act: Act) -> Callable[[Request], Awaitable[Response]]:
        """Return the request handler of a button, which calls `act`, the button's work, in a
        thread."""

        async def answer(request: Request) -> Response:
            ref = await _in_thread(self._find, request)
            return JSONResponse(await _in_thread(act, request, ref))

        return answer

    def cancel(self, request: Request, ref: JobRef) -> dict[str, Any]:
        """Cancel the job."""
        if self._access.board.verdict(ref) is not None:
            return {"notice": f"{ref.job_id} has already ended."}
        self._access.handle_of(ref).cancel(cleanup_timeout=0)
        return {"notice": f"{ref.job_id} is being cancelled."}

    def kill(self, request: Request, ref: JobRef) -> dict[str, Any]:
        """Kill a host, or all hosts of a slice."""
        chosen = {
            name: _number(request, name, 0)
            for name in ("slice", "host")
            if name in request.query_params
        }
        killed = self._access.handle_of(ref).kill_hosts(chosen.get("slice"), chosen.get("host"))
        return {"notice": f"KILL was sent to {killing.name_machines(ref, killed)} of {ref.job_id}."}

    def stacks(self, request: Request, ref: JobRef) -> dict[str, Any]:
        """Return the stacks of all hosts, grouped by equal stacks."""
        stacks = self._access.handle_of(ref).stacks()
        return {"text": text.printable_lines(blame.format_groups(stacks))}

    # -- batches, capacity -------------------------------------------------------------------------

    def show_batches(self, request: Request) -> Response:
        """Show all batches."""
        jobs = self._watch.read(patience_s=1.0)
        batches = list_batches(self._access.store, jobs)
        return self._page(request, "batches.html", batches=batches, trouble=jobs.trouble)

    def show_batch(self, request: Request) -> Response:
        """Show the inputs of one batch as a grid."""
        batch = self._read_batch(self._group_of(request), self._watch.read(patience_s=1.0))
        return self._page(request, "batch.html", batch=batch)

    async def stream_batch(self, request: Request) -> Response:
        """Stream changes of a batch's page."""
        group_id, version, cost_at, grid = self._group_of(request), -1, 0.0, ""

        def poll() -> Message:
            nonlocal version, cost_at, grid
            jobs = self._watch.read()
            message: Message = {"trouble": jobs.trouble}
            if jobs.version == version and time.monotonic() < cost_at:
                return message
            version, cost_at = jobs.version, time.monotonic() + _COST_EVERY_S
            before, grid = grid, self.render("_grid.html", batch=self._read_batch(group_id, jobs))
            return message | ({} if grid == before else {"html": {"grid": grid}})

        return self._stream(request, Source(poll, self._watch.every_s))

    def _read_batch(self, group_id: str, jobs: JobList) -> BatchGrid:
        return read_batch(self._access.store, group_id, jobs, self._spending)

    def show_capacity(self, request: Request) -> Response:
        """Show the capacity page. Its table is loaded later: a cluster may answer slowly."""
        return self._page(request, "capacity.html")

    def show_capacity_table(self, request: Request) -> Response:
        """Return the table of the capacity page."""
        return HTMLResponse(self.render("_capacity.html", table=capacity.read_capacity()))

    # -- helpers -----------------------------------------------------------------------------------

    def explain(self, request: Request, error: Exception) -> Response:
        """Answer with the error: as a page, or as JSON or an event for the page's script."""
        status = _NOT_FOUND if isinstance(error, NotFound) else 503
        status = 400 if isinstance(error, UsageError) else status
        if request.headers.get("accept") == _EVENTS:  # An event stream carries only events.
            message = {"trouble": str(error)} | ({"end": True} if status == _NOT_FOUND else {})
            return Response(format_event(message), media_type=_EVENTS)
        if request.headers.get("accept", "").startswith("text/html"):
            page = self.render("trouble.html", base=_base_of(request), error=str(error))
            return HTMLResponse(page, status_code=status)
        return JSONResponse({"error": text.printable_lines(str(error))}, status_code=status)

    def _stream(self, request: Request, *sources: Source) -> Response:
        async def is_over() -> bool:
            return self._is_ending() or await request.is_disconnected()

        return StreamingResponse(stream_events(sources, is_over), media_type=_EVENTS)

    def _page(self, request: Request, template: str, **values: Any) -> Response:
        return HTMLResponse(self.render(template, base=_base_of(request), **values))

    def _find(self, request: Request) -> JobRef:
        return self._access.find(request.path_params["job_id"])

    def _group_of(self, request: Request) -> str:
        return str(request.path_params["group_id"])


async def _in_thread(call: Callable[..., T], *args: Any) -> T:
    """Run a slow call in a daemon thread: Ctrl-C must not wait for a store that hangs."""
    return await run_in_thread(partial(call, *args), is_daemon=True)


def _base_of(request: Request) -> str:
    """Return the relative path from this page to the first page, because all addresses in pages are
    relative to the first page."""
    return "../" * request.url.path.strip("/").count("/") or "./"


def _filter_of(request: Request) -> tuple[str, str]:
    return request.query_params.get("state", ""), request.query_params.get("q", "")


def _number(request: Request, name: str, default: int) -> int:
    """Return a number from the address; `default` if it is missing or malformed."""
    try:
        return max(int(request.query_params.get(name, default)), 0)
    except ValueError:
        return default
