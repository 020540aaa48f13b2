"""The dashboard without a browser: its answers, and the contents of its pages."""

from __future__ import annotations

import html
import http.client
import json
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

import dashboard_world
from batch_cases import leave
from cli_fakes import chunk
from dashboard_world import NOW, World, ask, path_of
from manifest_cases import planned

import kinetic
from kinetic._client.batch.inputs import BatchEnd
from kinetic._client.batch.records import Batch
from kinetic._client.board import activity, colours, shape
from kinetic._client.board.spending import SpendingWatch
from kinetic._compile.checked import CheckReport
from kinetic._compile.report import describe_refusal
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang
from kinetic._core.gang.messages import Activity, GangSpec, Heartbeat
from kinetic._core.gang.picture import picture_of
from kinetic._core.metrics import Rows
from kinetic._core.outcome import HostReport, Outcome, RemoteError, Verdict
from kinetic._core.place import Place
from kinetic._core.plan import Cost
from kinetic._core.ref import JobRef
from kinetic._core.session import Session
from kinetic._core.state import JobStanding, JobStatus
from kinetic._dashboard import batches, charts, output, scene
from kinetic._dashboard.board_watch import BoardWatch, JobList, JobRow
from kinetic._dashboard.charts import ChartReader
from kinetic._dashboard.output import OutputReader
from kinetic._dashboard.pages import Pages
from kinetic._dashboard.server import DashboardServer
from kinetic._dashboard.session_line import draw_line
from kinetic._store import index
from kinetic.errors import StoreError

PATIENCE_S = 100.0

world, server = dashboard_world.world, dashboard_world.server


# -- answers ---------------------------------------------------------------------------------------


def test_inputs_whose_submitter_was_killed_wait_no_more(server: DashboardServer, world: World):
    leave(world.store, Batch("grp-00000001", 3, 0.0, name="a sweep"))
    status, _, body = ask(server, f"{path_of(server)}batches/grp-00000001")
    assert (status, "3 refused" in body, "3 waiting" in body) == (200, True, False)
    assert "the process that submitted the batch ended first" in body


def test_inputs_whose_jobs_are_not_listed_yet_are_not_refused(world: World):
    batch = Batch("grp-00000001", 2, NOW)
    records = leave(world.store, batch)
    for number in (0, 1):
        job_id = batch.job_id(number)
        ref = replace(world.add(number, group_id=batch.group_id, group_index=number), job_id=job_id)
        index.add(world.store, ref)
    for ended in (False, True):
        if ended:
            records.note_end(BatchEnd())
        spending = SpendingWatch(world.access.board)
        read = batches.read_batch(world.store, batch.group_id, JobList(), spending)
        assert [cell.state for cell in read.cells] == ["waiting", "waiting"]


def test_an_input_whose_job_was_removed_was_not_skipped(world: World):
    batch = Batch("grp-00000001", 2, NOW)
    leave(world.store, batch).note_end(BatchEnd("cancelled", frozenset({1})))
    spending = SpendingWatch(world.access.board)
    read = batches.read_batch(world.store, batch.group_id, JobList(), spending)
    assert [cell.state for cell in read.cells] == ["gone", "skipped"]


def test_requests_for_a_missing_job_batch_file_or_host_are_refused(
    server: DashboardServer, world: World
):
    base = path_of(server)
    status, _, body = ask(server, f"{base}jobs/job-0000000f", Accept="text/html")
    assert status == 404
    assert "This page cannot be shown" in body
    assert ask(server, f"{base}jobs/<script>", Accept="text/html")[0] == 400
    status, _, body = ask(server, f"{base}batches/grp-0")
    assert status == 404
    assert "There is no batch 'grp-0' in the store" in json.loads(body)["error"]
    assert ask(server, f"{base}static/../pages.py")[0] == 404
    ref = world.add()
    assert ask(server, f"{base}jobs/{ref.job_id}/output?host=7")[0] == 400
    assert ask(server, f"{base}jobs/{ref.job_id}/search?q=a&host=-1&from=x")[0] == 200
    assert ask(server, f"{base}rows?from=a&n=-5")[0] == 200


def test_what_the_compiler_said_is_shown_where_it_was_asked(server: DashboardServer, world: World):
    checked, other = world.add(1), world.add(2)
    refusal = describe_refusal("<step>", "a.py:1", resolve("tpu-v6e-8"), 1, detail="no room")
    report = CheckReport("tpu-v6e-8", (refusal,))
    key = layout.JobKeys(checked.job_id).compile_report
    world.store.put(key, json.dumps(report.to_json()).encode())
    base = f"{path_of(server)}jobs/"
    address = f"jobs/{checked.job_id}/compile"
    assert address in ask(server, f"{base}{checked.job_id}")[2]
    assert "/compile" not in ask(server, f"{base}{other.job_id}")[2]
    answer = ask(server, f"{base}{checked.job_id}/compile")[2]
    assert json.loads(answer)["text"] == str(report)
    assert ask(server, f"{base}{other.job_id}/compile")[0] == 404
    world.store.put(key, b"{")
    assert ask(server, f"{base}{checked.job_id}/compile")[0] == 503


def test_output_is_searched_and_downloaded(server: DashboardServer, world: World):
    ref = world.add()
    world.backend.output[ref.job_id] = [chunk(b"a needle\nhay\n"), chunk(b"NEEDLE too", host=1)]
    base = f"{path_of(server)}jobs/{ref.job_id}"
    hits = json.loads(ask(server, f"{base}/search?q=needle&host=all")[2])
    assert [(line[0], line[4]) for line in hits["lines"]] == [(0, "a needle"), (1, "NEEDLE too")]
    assert (hits["cut"], hits["size"]) == (False, "23 B")
    _, headers, body = ask(server, f"{base}/output?host=0")
    assert body == "a needle\nhay\n"
    assert headers["content-disposition"] == f'attachment; filename="{ref.job_id}-host-0.log"'
    assert headers["content-type"] == "application/octet-stream"


# -- all jobs --------------------------------------------------------------------------------------


def look_again(watch: BoardWatch) -> Any:
    watch._next_at = 0.0
    return watch.read()


def test_jobs_come_change_and_go(world: World):
    watch = BoardWatch(world.access)
    assert watch.read().rows == ()
    first, second = world.add(1), world.add(2, display_name="other", group_id="grp-7")
    listed = look_again(watch)
    assert [(row.ref.job_id, row.state) for row in listed.rows] == [
        (second.job_id, "running"),
        (first.job_id, "running"),
    ]
    assert look_again(watch).version == listed.version
    world.end(first)
    ended = look_again(watch)
    assert ended.version == listed.version + 1
    assert ended.counts() == {"succeeded": 1, "running": 1}
    assert [row.ref for row in ended.select("", "GRP-7 oth")] == [second]
    assert ended.select("succeeded", "other") == []
    index.remove(world.store, first.job_id)
    assert [row.ref for row in look_again(watch).rows] == [second]


def test_the_watch_asks_about_running_jobs_only_after_its_first_read(world: World):
    for number in range(30):
        world.end(world.add(number))
    watch = BoardWatch(world.access)
    look_again(watch)
    running = world.add(99)
    look_again(watch)
    world.backend.asked.clear()
    look_again(watch)
    assert world.backend.asked == [[running.job_id]]


def test_a_store_error_keeps_the_jobs_of_the_last_read_on_the_page(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    world.add()
    watch = BoardWatch(world.access)
    look_again(watch)

    def refuse(*_: object) -> None:
        raise StoreError("unplugged")

    monkeypatch.setattr(world.access.board, "read_standings", refuse)
    listed = look_again(watch)
    assert (listed.trouble, len(listed.rows)) == ("unplugged", 1)
    monkeypatch.undo()
    assert look_again(watch).trouble == ""


def test_a_reader_gets_the_last_rows_while_another_reader_waits_for_the_store(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    world.add()
    watch = BoardWatch(world.access)
    listed = look_again(watch)
    held, looks = threading.Event(), threading.Event()

    def hang(*_: object) -> dict[str, object]:
        looks.set()
        held.wait()
        return {}

    monkeypatch.setattr(world.access.board, "read_standings", hang)
    thread = threading.Thread(target=look_again, args=[watch])
    thread.start()
    looks.wait()
    assert watch.read().rows == listed.rows
    watch._began_at -= 60
    assert "has not answered for" in watch.read().trouble
    held.set()
    thread.join()


# -- one job ---------------------------------------------------------------------------------------

ELASTIC = JobRef("job-1", Place("fake"), "tpu-v6e-8", "f", "f", 0.0, "/s", hosts=6)


def test_slices_that_take_no_part_are_drawn_as_such():
    events = [
        GangEvent(EventKind.FORMED, slices=(0, 1, 2), hosts=tuple(range(6)), time=1.0),
        GangEvent(EventKind.READY, time=2.0),
        GangEvent(EventKind.SLICE_LOST, slices=(1,), time=3.0),
    ]
    (one,) = picture_of(events, 6).attempts
    boxes = scene.draw_slices(ELASTIC, one, [], {5: 12})
    assert [box.note for box in boxes] == ["2 hosts: running", "lost", "2 hosts: running"]
    assert [cell.state for cell in boxes[1].hosts] == ["lost", "lost"]
    assert boxes[2].hosts[1].facts == ("step 12",)
    events += [
        GangEvent(EventKind.ENDED, verdict=Verdict.FAILED, time=4.0),
        GangEvent(EventKind.FORMED, slices=(0, 2), hosts=(0, 1, 4, 5), attempt=2, time=5.0),
        GangEvent(EventKind.READY, attempt=2, time=6.0),
        GangEvent(EventKind.AWAITED, slices=(1,), attempt=2, time=7.0),
    ]
    attempts = picture_of(events, 6).attempts
    boxes = scene.draw_slices(ELASTIC, attempts[1], [], {})
    assert boxes[1].note == "awaited: it is being started again"
    # Output is stored by the index in the attempt; hosts keep their index in the job.
    cells = [(cell.host, cell.member, cell.state) for box in boxes for cell in box.hosts]
    assert cells == [
        (0, 0, "running"),
        (1, 1, "running"),
        (2, None, "away"),
        (3, None, "away"),
        (4, 2, "running"),
        (5, 3, "running"),
    ]
    bars = scene.draw_bars(attempts, 0.0, 11.0)
    assert [(bar.begin, bar.ready, bar.end, bar.state) for bar in bars] == [
        (0, 100, 300, "failed"),
        (400, 500, 1000, "running"),
    ]


def test_a_host_that_saves_is_drawn_as_such_unless_the_gang_says_that_it_stalls():
    ref = replace(ELASTIC, hosts=2)
    events = [GangEvent(EventKind.JOINED, host=host, time=1.0) for host in range(2)]
    events += [GangEvent(EventKind.READY, time=2.0)]
    gang = Gang(GangSpec(2), 0.0)
    for host in range(2):
        gang.join(host, f"agent {host}", f"address {host}", 1.0)
        beat = Heartbeat(host, Activity.RUNNING, stalled_s=8.0, saving_step=(20, None)[host])
        gang.heartbeat(beat, 3.0)
    lines = activity.lines(ref, "RUNNING", gang.snapshot(), activity.Rates(), NOW)
    (attempt,) = picture_of(events, 2).attempts
    (box,) = scene.draw_slices(ref, attempt, lines, {0: 21})
    assert [cell.state for cell in box.hosts] == ["saving", "stalled"]
    assert box.hosts[0].facts[0] == "step 21"
    assert "saving step 20" in box.hosts[0].facts
    assert box.note == "2 hosts: 1 saving, 1 stalled"
    events += [GangEvent(EventKind.STALLED, hosts=(0,), time=3.0)]
    (attempt,) = picture_of(events, 2).attempts
    (box,) = scene.draw_slices(ref, attempt, lines, {})
    assert box.hosts[0].state == "stalled"


def test_times_out_of_order_are_drawn_within_the_line():
    (attempt,) = picture_of([GangEvent(EventKind.READY, time=5.0)], 1).attempts
    (bar,) = scene.draw_bars([attempt], 0.0, 1.0)  # The clock was set back.
    assert 0 <= bar.begin <= bar.ready < bar.end <= 1000


def test_an_attempt_that_took_no_time_is_drawn():
    events = [
        GangEvent(EventKind.READY, time=1.0),
        GangEvent(EventKind.ENDED, verdict=Verdict.FAILED, time=5.0),
        GangEvent(EventKind.FORMED, hosts=(0,), attempt=2, time=6.0),
        GangEvent(EventKind.READY, attempt=2, time=6.0),
        GangEvent(EventKind.ENDED, verdict=Verdict.FAILED, attempt=2, time=6.0),
    ]
    last = scene.draw_bars(picture_of(events, 1).attempts, 0.0, 6.0)[-1]
    assert last.ready < last.end <= 1000


def test_a_function_that_was_over_before_it_left_an_event_has_a_length():
    reports = [HostReport(0, Exit.RAISED, started_at=3.0)]
    outcome = Outcome(Verdict.FAILED, (0,), reports=(*reports,), ended_at=5.0)
    (bar,) = scene.draw_bars(picture_of([], 1, outcome).attempts, 1.0, 5.0)
    assert (bar.state, bar.length, bar.ready) == ("failed", "2.0s", 0)


def test_a_slice_is_shown_with_its_layout_unless_the_name_has_its_count():
    assert shape.name_slice(resolve("cpu:2")) == "cpu:2"
    assert shape.name_slice(resolve("tpu-v6e-16")) == "tpu-v6e-16 · 4x4"


def test_a_page_and_its_first_lines_do_not_wait_for_charts(world: World):
    ref = world.add()
    world.end(ref)
    world.backend.output[ref.job_id] = [chunk(b"a line\n")]
    key = layout.HostKeys(ref.job_id, 1, 0).metrics
    world.store.put(layout.JobKeys(ref.job_id).plan, b"{}")
    world.store.path(key).parent.mkdir(parents=True)
    columns = array("d", [NOW, NOW]), array("q", [0, 1]), [array("d", [2.0, 1.0])]
    world.store.path(key).write_bytes(Rows(("loss",), *columns).encode())
    pages = Pages(world.access, lambda: False)
    printed, job, curves = pages.make_sources(ref, 0)
    first = job.poll()
    assert first is not None
    assert "charts" not in first["html"]
    assert job.poll() is None
    job.close()
    lines = printed.poll()
    assert lines is not None
    assert [line[4] for line in lines["lines"]] == ["a line"]
    assert printed.poll() is None
    drawn = curves.poll()
    assert drawn is not None
    ((name, figure, points),) = drawn["charts"]
    assert (name, ">loss</span>" in figure) == ("loss", True)
    assert list(points) == [(0.0, "0: 2"), (320.0, "1: 1")]
    assert curves.poll() is None


def test_a_failed_job_shows_what_its_first_host_raised(server: DashboardServer, world: World):
    ref = world.add()
    trace = "Traceback (most recent call last):\n  <here>\x1b[2J\nValueError: no"
    reports = (
        HostReport(0, Exit.STOPPED),
        HostReport(1, Exit.RAISED, error=RemoteError("ValueError", "no", trace)),
    )
    outcome = Outcome(Verdict.FAILED, (1,), "host 1: ValueError: no", reports, ended_at=NOW)
    index.write_outcome(world.store, ref.job_id, outcome)
    _, _, body = ask(server, f"{path_of(server)}jobs/{ref.job_id}")
    text = html.unescape(body.partition('aria-label="Traceback">')[2].partition("</pre>")[0])
    assert text == trace.replace("\x1b", "\\x1b")
    assert body.index("ValueError: no</pre>") < body.index('id="attempts"')
    # The page first shows the output of the host to blame.
    assert 'max="1" value="1"' in body
    assert "output?host=1" in body


def log(world: World, ref: JobRef, names: Iterable[str], step: int) -> None:
    path = world.store.path(layout.HostKeys(ref.job_id, 1, 0).metrics)
    world.store.put(layout.JobKeys(ref.job_id).plan, b"{}")
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = array("d", [NOW + step]), array("q", [step]), [array("d", [1.0]) for _ in names]
    with path.open("ab") as file:
        file.write(Rows(tuple(names), *columns).encode())


def test_only_charts_that_have_changed_are_sent_and_all_in_turn(world: World):
    ref = world.add()
    names = [f"m/{number}" for number in range(3 * charts.AT_ONCE)]
    reader = ChartReader(world.store, ref, 0)

    def look() -> list[str]:
        return [chart.name for chart in reader.draw_changed()]

    log(world, ref, names, 1)
    assert look() == names
    assert look() == []
    log(world, ref, names[:2], 2)
    assert look() == names[:2]
    log(world, ref, names, 3)
    turns = [look() for _ in range(4)]
    # Charts that were drawn last come last, and no chart is drawn without need.
    assert turns == [names[2:10], names[10:18], [*names[18:], *names[:2]], []]


# -- sessions --------------------------------------------------------------------------------------


def call_row(
    number: int, started_at: float | None, ended_at: float | None, state: str = "SUCCEEDED"
) -> JobRow:
    ref = replace(ELASTIC, job_id=f"job-{number}", place=Place("fake", session="job-s"))
    return JobRow(ref, JobStanding(state, "", ended_at, started_at))


def test_calls_lie_on_the_line_between_idle_gaps():
    """Calls that have begun are bars from begin to end; one that waits is no bar."""
    calls = [
        call_row(4, None, None, "PENDING"),
        call_row(3, 1090.0, None, "RUNNING"),
        call_row(2, 1020.0, 1040.0, "FAILED"),
        call_row(1, 1000.0, 1020.0),
    ]
    line = draw_line(calls, 1000.0, 1100.0)
    bars = [(bar.row.state, bar.begin, bar.begin + bar.length) for bar in line.bars]
    # Bars of calls that follow each other at once are parted.
    assert bars == [("succeeded", 0, 199), ("failed", 200, 399), ("running", 900, 999)]
    assert (line.since, line.until, line.busy_s) == (1000.0, 1100.0, 50.0)
    assert line.idle_since is None
    assert draw_line(calls[2:], 1000.0, 1100.0).idle_since == 1040.0
    assert draw_line([], 1000.0, 1100.0).idle_since == 1000.0


def test_a_call_of_no_time_and_a_clock_that_was_set_back_are_drawn_within_the_line():
    """Every bar can be seen, and lies on the line."""
    calls = [call_row(2, 1100.0, 1100.0), call_row(1, 900.0, 800.0)]
    for until in (1100.0, 1000.0, 900.0):
        for bar in draw_line(calls, 1000.0, until).bars:
            assert bar.length >= scene.LEAST
            assert 0 <= bar.begin <= bar.begin + bar.length <= 1000


def test_a_line_of_many_calls_begins_with_the_first_one_that_has_room():
    """Older calls are counted and listed, but not drawn."""
    calls = [call_row(n, 1000.0 + n, 1000.5 + n) for n in range(1000, 0, -1)]
    line = draw_line(calls, 900.0, 2010.0)
    assert (len(line.calls), len(line.bars)) == (1000, 200)
    assert (line.since, line.bars[0].row.ref.job_id) == (1801.0, "job-801")
    assert line.busy_s == 100.0


def test_the_line_of_an_idle_session_changes_once_in_many_seconds():
    """Otherwise each poll of an open page sends all bars again."""
    calls = [call_row(1, 1000.0, 1500.0)]
    lines = {draw_line(calls, 1000.0, 4600.0 + n).bars for n in range(16)}
    assert len(lines) <= 3


def hold(world: World, **fields: Any) -> JobRef:
    """Add the session dev, whose hosts have been there for 900 s."""
    ref = world.add(0, session_name="dev", display_name="session dev", **fields)
    cost = Cost(3.60, "list price, us-east5")
    plan = replace(planned("tpu-v6e-8"), job_id=ref.job_id, holds=Session("dev"), cost=cost)
    world.store.put(layout.JobKeys(ref.job_id).plan, json.dumps(plan.to_json()).encode())
    world.store.put(
        layout.JobKeys(ref.job_id).events, b'{"time": %f, "kind": "ready"}' % (NOW - 900)
    )
    return ref


def test_the_page_of_a_session_has_its_calls_its_cost_and_its_end(
    server: DashboardServer, world: World
):
    """Each call is a bar that leads to its page; a call's page leads back to the session, unless
    that was removed."""
    ref = hold(world)
    called = world.add(1, place=Place("fake", session=ref.job_id), display_name="<train>")
    world.end(called)
    orphan = world.add(2, place=Place("fake", session="job-removed"))
    base = f"{path_of(server)}jobs/"
    _, _, body = ask(server, f"{base}{ref.job_id}")
    bar = body.partition('<div class="timeline">')[2].partition("</svg>")[0]
    assert f'<a href="jobs/{called.job_id}"' in bar
    assert f"<title>{called.job_id} &lt;train&gt;: succeeded</title>" in bar
    assert "Calls ran for 100s of " in body
    assert "about $0.90 so far ($3.60 an hour" in body
    # The last call ended 800 s ago, and the session ends 1,800 s after that.
    assert f'The session ends at <time data-at="{NOW - 800 + 1800:.3f}"></time>, unless' in body
    assert 'id="output"' not in body
    _, _, body = ask(server, f"{base}{called.job_id}")
    assert f'<a href="jobs/{ref.job_id}">dev</a>' in body
    assert "<dd>job-removed</dd>" in ask(server, f"{base}{orphan.job_id}")[2]


def test_a_session_that_has_ended_holds_no_hosts(server: DashboardServer, world: World):
    """No host is drawn as running, and the page names no time at which the session will end."""
    ref = hold(world)
    path = f"{path_of(server)}jobs/{ref.job_id}"
    _, _, body = ask(server, path)
    assert "2 hosts: running" in body
    assert "The session ends at" in body
    outcome = Outcome(Verdict.SUCCEEDED, reason="no call came", ended_at=NOW - 10)
    index.write_outcome(world.store, ref.job_id, outcome)
    _, _, body = ask(server, path)
    assert "2 hosts: away" in body
    assert "The session ends" not in body
    assert f'<span><time data-at="{NOW - 10:.3f}"></time></span>' in body


def test_the_list_of_jobs_names_sessions_and_finds_their_calls(
    server: DashboardServer, world: World
):
    """A session has the number of its calls, each call its session, and a search finds both."""
    ref = hold(world)
    call = world.add(1, place=Place("fake", session=ref.job_id))
    world.add(2, display_name="other")
    for words in ("session+dev", ref.job_id):
        rows = json.loads(ask(server, f"{path_of(server)}rows?q={words}")[2])
        assert rows["total"] == 2
        assert f"{ref.job_id} · 1 call" in rows["html"]
        assert f"{call.job_id} · session dev" in rows["html"]


def test_a_slice_that_a_session_lost_is_drawn_as_lost_until_it_is_back():
    """A session forms no second attempt, so its first one must forget the loss."""
    events = [
        GangEvent(EventKind.READY, time=1.0),
        GangEvent(EventKind.SLICE_LOST, slices=(1,), time=2.0),
    ]
    (held,) = picture_of(events, 6).attempts
    assert [box.note for box in scene.draw_slices(ELASTIC, held, [], {})][1] == "lost"
    events += [GangEvent(EventKind.SLICE_BACK, slices=(1,), time=3.0)]
    (held,) = picture_of(events, 6).attempts
    notes = [box.note for box in scene.draw_slices(ELASTIC, held, [], {})]
    assert notes == ["2 hosts: running"] * 3


# -- output ---------------------------------------------------------------------------------------


def test_output_is_read_on_in_parts(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "READ_BYTES", 10)
    ref = world.add()
    world.backend.output[ref.job_id] = [chunk(b"line one\n"), chunk(b"line two\n"), chunk(b"op")]
    reader = OutputReader(world.handle(ref), 0)
    texts = [[line.text for line in lines] for lines, _ in (reader.read(), reader.read())]
    assert texts == [["line one", "line two"], []]
    assert reader.read() == ([], "op")
    world.backend.output[ref.job_id].append(chunk(b"en\n"))
    lines, rest = reader.read()
    assert ([line.text for line in lines], rest) == (["open"], "")


def test_a_search_of_output_stops_after_its_limits_and_says_that_it_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    ref = world.add()
    world.backend.output[ref.job_id] = [chunk(b"hit\n" * 300) for _ in range(4)]
    hits = output.search(world.handle(ref), 0, "HIT")
    assert (len(hits.lines), hits.is_cut) == (output.HITS, True)
    monkeypatch.setattr(output, "SEARCH_BYTES", 100)
    assert output.search(world.handle(ref), 0, "absent").is_cut


def test_a_search_that_nobody_waits_for_ends(server: DashboardServer, world: World):
    has_begun, is_over = threading.Event(), threading.Event()

    class Endless(list[Any]):
        def __iter__(self):
            try:
                while True:
                    has_begun.set()
                    time.sleep(0.01)
                    yield chunk(b"hay\n")
            finally:
                is_over.set()

    ref = world.add()
    world.backend.output[ref.job_id] = Endless()
    asking = http.client.HTTPConnection("127.0.0.1", server.port)
    asking.request("GET", f"{path_of(server)}jobs/{ref.job_id}/search?q=needle")
    assert has_begun.wait(PATIENCE_S)
    assert not is_over.is_set()
    asking.close()
    assert is_over.wait(PATIENCE_S)


# -- colours ---------------------------------------------------------------------------------------


def test_every_state_has_its_colour():
    from kinetic._client.batch.inputs import InputState
    from kinetic._core.exits import HostState

    states = [*JobStatus, *HostState, *Activity, *InputState, activity.SAVING, activity.IDLE]
    assert {str(each).lower() for each in states} <= colours.STATES.keys()
    style = (Path(kinetic.__file__).parent / "_dashboard/static/dashboard.css").read_text()
    for colour in colours.STATES.values():
        assert f"--{colour}:" in style
        assert colour in colours.TERMINAL.keys() & colours.NOTEBOOK.keys()
