"""The dashboard in a real browser: its pages watch, search, cancel and kill jobs. Some jobs run on
this machine; others are only records in a store. Without Chromium the tests are skipped: `apt-get
install chromium chromium-driver`."""

from __future__ import annotations

import http.server
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from array import array
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dashboard_cases import PHONE, WIDE, Page, Showcase, missing_programs, open_browser, serve
from gangs import wait_until
from on_dashboard import run_on, save_step_three, stand_still, train
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import kinetic
from kinetic._client.access import open_access
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.metrics import Rows
from kinetic._core.outcome import Verdict
from kinetic._core.place import Place
from kinetic._store import index
from kinetic._store.base import folder_of
from kinetic.errors import StoreError

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>bold</b>'


@pytest.fixture(scope="session")
def browser():
    if missing := missing_programs():
        pytest.skip(f"needs a browser: there is no {' and no '.join(missing)} on the PATH")
    with tempfile.TemporaryDirectory(prefix="kn-browser-", dir="/tmp") as folder:
        chrome = open_browser(Path(folder))
        yield chrome
        chrome.quit()


@pytest.fixture
def page(browser, home):
    """The dashboard's pages, for the jobs in this test's home folder."""
    home.mkdir(parents=True, mode=0o700)
    with serve(open_access({})) as server:
        yield Page(browser, server.url)
        browser.get("about:blank")


@pytest.fixture
def show(tmp_path):
    """A store of jobs that no host runs. It is in memory, because a disk takes a minute for 20,000
    files."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else tmp_path
    with tempfile.TemporaryDirectory(prefix="kn-show-", dir=folder) as root:
        yield Showcase(Path(root, "store"))


@pytest.fixture
def shown_page(browser, show):
    """The dashboard's pages, for the jobs in `show`."""
    with serve(show.access) as server:
        yield Page(browser, server.url)
        browser.get("about:blank")


# -- jobs that run ---------------------------------------------------------------------------------


def test_a_training_is_watched_live_to_its_end(page, tmp_path):
    page.open().wait_for("There are no jobs yet")
    handle = kinetic.run("cpu", name="a training")(train).run_async(str(tmp_path / "end"))
    page.wait_for("a training", "#rows")
    page.wait_for("running", "#rows")
    page.click(f"#row-{handle.job_id}")
    page.wait_for("step 3", "#lines")
    assert page.count("#cancel") == 1
    (tmp_path / "end").touch()
    page.wait_for("succeeded", "#head")
    page.wait_for("done <b>bold</b> red", "#lines")
    assert page.count("#cancel") == 0
    assert "succeeded after" in page.text("#attempts")
    assert page.complaints() == []


def test_a_lost_slice_is_seen_and_what_is_done_is_asked_first(page, tmp_path, monkeypatch, request):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    remote = kinetic.run("cpu", slices=(1, 2), on_slice_loss="shrink", name="elastic")(run_on)
    handle = remote.run_async(str(tmp_path / "end"))
    page.open(f"jobs/{handle.job_id}").wait_for("on slice 0 of 2", "#lines")
    page.click('[data-act$="kill?slice=1"]')
    page.wait_for("Kill all hosts of slice 1", "#ask")
    # The browser reports the closing of a dialog late: by then the second dialog is open.
    reopen = """document.querySelector("#ask [value=no]").click();
        document.querySelector('[data-act$="kill?slice=1"]').click()"""
    page.run(reopen)
    page.wait_for("Kill all hosts of slice 1", "#ask")
    page.click("#ask [value=yes]")
    began = time.monotonic()
    page.wait_for("lost slice 1", "#attempts")
    seen_after_s = round(time.monotonic() - began, 2)
    request.node.user_properties.append(("lost_slice_seen_after_s", seen_after_s))
    page.wait_for("KILL was sent to host 1", "#notice")
    page.wait_for("on slice 0 of 1", "#lines")
    page.wait_for("1 host: away", "#slice-1")
    assert len([each for each in handle.events() if each["kind"] == "slice_lost"]) == 1

    page.click("#cancel")
    page.wait_for("Unsaved work is lost", "#ask")
    assert not handle.status().ended
    page.click("#ask [value=yes]")
    page.wait_for("cancelled", "#head")
    assert handle.status() == "CANCELLED"
    assert page.complaints() == []


def test_a_host_that_stands_still_is_found_and_its_output_searched(page, tmp_path):
    remote = kinetic.run("cpu", slices=2, name="<i>still</i>", env={"KEY": "a-value"})(stand_still)
    handle = remote.run_async(str(tmp_path / "end"))
    page.open(f"jobs/{handle.job_id}").wait_for("busy", "#lines")
    assert "<i>still</i>" in page.text("h1")
    page.find("#search").send_keys("needle")
    page.wait_for("0 lines in", "#hits")
    page.click("#everywhere")
    page.wait_for("1 line in", "#hits")
    assert page.text("#matches") == "[host 1] needle in host one"
    assert page.text("#matches mark") == "needle"
    page.find("#search").send_keys(Keys.ESCAPE)
    page.click("#host-1")
    page.wait_for("warned", "#lines")
    assert page.text("#lines").splitlines() == ["needle in host one", "warned"]
    page.click("details[data-load$=stacks] summary")
    page.wait_for("stand_still", "details[data-load$=stacks] .loaded")
    page.click("details[data-load$=explain] summary")
    page.wait_for("RUNNING", "details[data-load$=explain] .loaded")
    page.click("details[data-load$=call] summary")
    page.wait_for("2 slices of cpu", "details[data-load$=call] .loaded")
    assert "KEY" in page.text("details[data-load$=call]")
    assert "a-value" not in page.text("details[data-load$=call]")
    page.click("details[data-load$=source] summary")
    page.wait_for("on_dashboard.py", "details[data-load$=source] .loaded")
    (tmp_path / "end").touch()
    page.wait_for("succeeded", "#head")
    assert page.complaints() == []


def test_the_calls_of_a_session_are_watched_on_a_line_of_time(page, tmp_path):
    """A call grows while it runs, ends in the colour of its verdict, and leads to its page and
    back. A new call takes the focus from no other; the session is stopped on its page."""
    session = kinetic.session("cpu", name="dev")
    remote = kinetic.run("cpu", session="dev", name="a call")(train)
    try:
        page.open(f"jobs/{session.job.job_id}").wait_for("No call yet", "#calls")
        first = remote.run_async(str(tmp_path / "end"))
        page.wait_for("The session ends by", "#calls")
        wait_until(lambda: page.count(f"#bar-{first.job_id} .s-running"), "no bar grows")
        (tmp_path / "end").touch()
        page.wait_for("unless a call comes", "#calls")
        wait_until(lambda: page.count(f"#bar-{first.job_id} .s-succeeded"), "its bar is not green")
        page.wait_for("1 host: idle", "#slice-0")

        page.find(f"#row-{first.job_id}").send_keys("")  # Gives it the focus.
        second = remote.run_async(str(tmp_path / "end"))
        wait_until(lambda: page.count(f"#bar-{second.job_id} .s-succeeded"), "it is not drawn")
        assert page.run("return document.activeElement.id") == f"row-{first.job_id}"
        page.find(f"#bar-{second.job_id}").click()
        page.wait_for("a call", "h1")
        page.click(f'#head a[href="jobs/{session.job.job_id}"]')
        page.wait_for("session dev", "h1")
        page.click("#cancel")
        page.wait_for("This also ends its calls", "#ask")
        page.click("#ask [value=yes]")
        page.wait_for("cancelled", "#head")
        page.open("?q=session+dev").wait_for("3 shown", "#total")
        page.wait_for("2 calls", "#rows")
        assert page.complaints() == []
    finally:
        session.stop(force=True)


@pytest.mark.long
def test_a_host_that_writes_a_checkpoint_is_drawn_as_saving(page, tmp_path):
    end = tmp_path / "end"
    handle = kinetic.run("cpu")(save_step_three).run_async(str(end), str(tmp_path))
    page.open(f"jobs/{handle.job_id}").wait_for("saving step 3", "#slice-0 .host.s-saving")
    assert page.text("#slice-0 .slice-head").endswith("1 host: saving")
    end.touch()
    page.wait_for("saved", "#lines")
    page.wait_for("running", "#slice-0 .host.s-running")
    assert "saving" not in page.text("#slice-0")
    (tmp_path / "end-too").touch()
    page.wait_for("succeeded", "#head")
    assert page.complaints() == []


# -- the command `kinetic dashboard` ---------------------------------------------------------------


def test_the_command_serves_until_it_is_interrupted(home):
    words = [*KINETIC, "dashboard", "--no-open"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        url = command.stdout.readline().strip()
        with urllib.request.urlopen(url) as page:
            assert "There are no jobs yet" in page.read().decode()
        with urllib.request.urlopen(f"{url}live") as stream:  # A page stays connected meanwhile.
            assert stream.readline().startswith(b"data: ")
            command.send_signal(signal.SIGINT)
            assert command.wait() == 0
        assert (
            command.stderr.read()
            == "The dashboard is served to this machine only. Press Ctrl-C to stop it.\n"
        )


HANGING = """
import threading
from kinetic._store import index
def hang(store):
    print("hangs", flush=True)
    threading.Event().wait()
index.list_ids = hang
from kinetic.cli.main import main
main()
"""


def test_an_interrupt_does_not_wait_for_a_store_that_hangs(home):
    words = [sys.executable, "-c", HANGING, "dashboard", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        address = urlsplit(command.stdout.readline().strip())
        for path in ("live", ""):
            asking = socket.create_connection((address.hostname, address.port))
            asking.sendall(f"GET {address.path}{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            with asking:
                assert path or asking.recv(12) == b"HTTP/1.1 200"
                assert not path or command.stdout.readline() == "hangs\n"
        command.send_signal(signal.SIGINT)
        try:
            assert command.wait(60) == 0
        finally:
            command.kill()


# -- many jobs, many hosts -------------------------------------------------------------------------


@pytest.mark.long
def test_ten_thousand_jobs_scroll(show, shown_page):
    for number in range(10_000):
        show.add(number, verdict=Verdict.FAILED if number == 77 else Verdict.SUCCEEDED)
    show.add(10_000, display_name="the newest")
    shown_page.open().wait_for("the newest", "#rows")
    shown_page.wait_for("9,999 succeeded", "#counts")
    shown_page.run("scrollTo(0, document.body.scrollHeight)")
    wait_until(lambda: shown_page.count("#row-job-00000000"), "the oldest job is not there")
    assert shown_page.count("#rows > .row") < 100
    shown_page.click('#counts [data-state="failed"]')
    shown_page.wait_for("1 shown", "#total")
    assert shown_page.count("#rows > .row") == 1
    shown_page.click('#counts [data-state="failed"]')
    wait_until(lambda: not shown_page.text("#total"), "not all are shown again")
    shown_page.find("#filter").send_keys("newest")
    shown_page.wait_for("1 shown", "#total")
    shown_page.find("#filter").send_keys(Keys.ESCAPE)
    wait_until(lambda: not shown_page.text("#total"), "not all are shown again")
    # Rows are replaced whenever a job changes; the focused row must keep the focus.
    focused = "return document.activeElement.dataset.n"
    for number in ("0", "1", "2"):
        shown_page.press("j")
        wait_until(
            lambda number=number: shown_page.run(focused) == number, "the next row has no focus"
        )
    shown_page.press(Keys.ENTER)
    shown_page.wait_for("job-0000270e", "#head")


def test_a_thousand_hosts_are_drawn_and_the_stalled_one_is_found(show, shown_page):
    ref = show.add(
        1,
        hosts=1024,
        accelerator="tpu-v4-4096",
        events=[
            *(GangEvent(EventKind.JOINED, host=host, time=1.0) for host in range(1024)),
            GangEvent(EventKind.READY, time=2.0),
            GangEvent(EventKind.STALLED, hosts=(517,), time=3.0),
        ],
    )
    shown_page.open(f"jobs/{ref.job_id}").wait_for("1,023 running, 1 stalled", "#slice-0")
    assert shown_page.count(".square.s-running") == 1023
    shown_page.wait_for("host 517 stalled", "#attention")
    shown_page.click('#attention [data-host="517"]')
    wait_until(lambda: shown_page.count('#host-517[aria-pressed="true"]'), "it was not chosen")
    assert shown_page.find("#host").get_attribute("value") == "517"
    # Of all squares, Tab reaches only the chosen one.
    assert shown_page.run(
        "return [...document.querySelectorAll('.square[tabindex=\"0\"]')].map((e) => e.id)"
    ) == ["host-517"]
    shown_page.run("document.getElementById('host-517').focus()")
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT):
        shown_page.press(key)
    assert shown_page.run("return document.activeElement.id") == "host-518"


# -- output, metrics ------------------------------------------------------------------------------

WRAPPED = b"".join(b"line %d " % number + b"words " * 80 + b"\n" for number in range(300))
END_IN_VIEW = """
const box = document.getElementById("lines"), last = box.lastElementChild;
return !!last && last.getBoundingClientRect().bottom <= box.getBoundingClientRect().bottom + 1;
"""


def test_the_newest_lines_stay_in_view_however_they_wrap(show, shown_page):
    ref = show.add(1)
    printed = show.backend.output[ref.job_id] = [WRAPPED + b"ValueError: the cause\n"]
    shown_page.open(f"jobs/{ref.job_id}").wait_for("ValueError", "#lines")
    wait_until(lambda: shown_page.run(END_IN_VIEW), "the end of the output is not in view")
    printed.append(WRAPPED + b"the last line\n")
    shown_page.wait_for("the last line", "#lines")
    wait_until(lambda: shown_page.run(END_IN_VIEW), "the page has stopped following")
    shown_page.resize(PHONE)
    wait_until(
        lambda: shown_page.run(END_IN_VIEW), "the page does not follow where lines wrap anew"
    )
    assert not shown_page.find("#newest").is_displayed()

    shown_page.run('document.getElementById("lines").scrollTop -= 500')
    wait_until(
        lambda: shown_page.find("#newest").is_displayed(), "who scrolls up is not left alone"
    )
    printed.append(b"one more line\n")
    shown_page.wait_for("one more line", "#lines")
    assert not shown_page.run(END_IN_VIEW)
    shown_page.click("#newest")
    wait_until(lambda: shown_page.run(END_IN_VIEW), "the button does not lead to the end")


def test_colours_of_a_terminal_are_shown(show, shown_page):
    ref = show.add(1)
    show.backend.output[ref.job_id] = [
        b"plain \x1b[1;31mred and\nbold\x1b[0m \x1b[38;5;10mgreen\x1b[38;2;1;2;3mother\x1b[m <b>\n",
        b"\x1b[94mno end",
    ]
    shown_page.open(f"jobs/{ref.job_id}").wait_for("no end", "#lines")
    spans = """return [...document.querySelectorAll("#lines > div > span")]
        .map((span) => [span.className, span.textContent])"""
    assert shown_page.run(spans) == [
        ["ansi-1 bold", "red and"],
        ["ansi-1 bold", "bold"],
        ["ansi-2", "green"],
        ["ansi-4", "no end"],
    ]
    assert shown_page.text("#lines").splitlines()[1] == "bold greenother <b>"
    shown_page.find("#search").send_keys("and")
    shown_page.wait_for("1 line in", "#hits")
    assert shown_page.text("#matches") == "plain red and"


def log(show, ref, values, step):
    """Append a row to host 0's metrics of the job."""
    path = folder_of(show.store) / layout.HostKeys(ref.job_id, 1, 0).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = array("d", [step]), array("q", [step]), [array("d", [v]) for v in values.values()]
    with path.open("ab") as file:
        file.write(Rows(tuple(values), *columns).encode())


def test_all_metrics_are_drawn_in_groups_and_found_by_name(show, shown_page):
    ref = show.add(1)
    show.store.put(layout.JobKeys(ref.job_id).plan, b"{}")
    names = ["loss", *(f"grads/layer_{number}" for number in range(40)), "host/<i>x</i>"]
    for step in (1, 12_345_678):
        log(show, ref, dict.fromkeys(names, -1.235e-5), step)
    shown_page.open(f"jobs/{ref.job_id}").wait_for("layer_39", "#groups")
    assert shown_page.count("#groups figure") == len(names)
    assert shown_page.count("#groups details[open]") == 3
    ActionChains(shown_page.browser).move_to_element(shown_page.find("#groups svg")).perform()
    shown_page.wait_for("1: -1.235e-05", "#groups .at")
    clipped = """return [...document.querySelectorAll(".high, .low, .ends")]
        .filter((label) => label.scrollWidth > label.clientWidth)
        .map((label) => label.textContent)"""
    assert shown_page.run(clipped) == []
    shown_page.find("#find-chart").send_keys("LAYER_3")
    visible = "return [...document.querySelectorAll('#groups figure:not([hidden])')].length"
    wait_until(lambda: shown_page.run(visible) == 11, "the metrics are not filtered")
    assert shown_page.count("#groups details[hidden]") == 2
    assert shown_page.complaints() == []


def test_a_value_under_the_pointer_and_a_selection_survive_an_update(show, shown_page):
    joined = [GangEvent(EventKind.JOINED, host=host, time=1.0) for host in range(2)]
    events = [*joined, GangEvent(EventKind.READY, time=2.0)]
    ref = show.add(1, hosts=2, accelerator="tpu-v6e-8", events=events)
    show.store.put(layout.JobKeys(ref.job_id).plan, b"{}")
    for step in (0, 1):
        log(show, ref, {"loss": 2.0}, step)
    shown_page.open(f"jobs/{ref.job_id}").wait_for("loss", "#groups")
    shown_page.wait_for("running", "#slice-0")
    svg = shown_page.find("#groups svg")
    ActionChains(shown_page.browser).move_to_element(svg).perform()
    shown_page.wait_for("0: 2", "#groups .at")
    select = "getSelection().selectAllChildren(document.querySelector(arguments[0]))"
    shown_page.run(select, "#slice-0 .slice-head b")
    selected = shown_page.run("return getSelection().toString()")
    assert "tpu-v6e-8" in selected

    log(show, ref, {"loss": 7.0}, 2)
    events.append(GangEvent(EventKind.STALLED, hosts=(0,), time=3.0))
    lines = "".join(f"{json.dumps(each.to_json())}\n" for each in events)
    show.store.put(layout.JobKeys(ref.job_id).events, lines.encode())
    shown_page.wait_for("stalled", "#slice-0")
    shown_page.wait_for("1: 2", "#groups .at")
    assert shown_page.count("#groups .needle") == 1
    assert shown_page.run("return getSelection().toString()") == selected


def test_a_host_that_does_not_exist_is_corrected_where_it_was_written(show, shown_page):
    ref = show.add(1, hosts=4, accelerator="tpu-v6e-16")
    shown_page.open(f"jobs/{ref.job_id}").wait_for("running", "#head")
    for written, meant in (("99", "3"), ("-1", "0"), ("", "0"), ("2", "2")):
        field = shown_page.find("#host")
        shown_page.run("arguments[0].value = arguments[1]", field, written)
        shown_page.run("arguments[0].dispatchEvent(new Event('change'))", field)
        assert field.get_property("value") == meant


# -- hostile text, removed jobs, a silent store ----------------------------------------------------


def test_hostile_text_stays_text(show, shown_page):
    done = show.add(
        1, verdict=Verdict.FAILED, display_name=HOSTILE, reason=f"RuntimeError: {HOSTILE}"
    )
    running = show.add(2, display_name=HOSTILE, group_id="grp-1", group_index=0)
    show.backend.output[running.job_id] = [
        f"{HOSTILE}\n".encode(),
        b"\x1b[2J\x1b]8;;http://evil\x07link\x1b]8;;\x07 \x9b\x00\xff\n",
        *[b"x" * (1 << 20)] * 10,
        b"\nbar 1\rbar 2\rbar 3",
    ]
    shown_page.open().wait_for(HOSTILE, "#rows")
    assert not shown_page.run("return window.hacked")
    shown_page.open(f"jobs/{done.job_id}").wait_for(HOSTILE, ".reason")
    shown_page.open("batches").wait_for("grp-1", "main")
    shown_page.open("batches/grp-1").wait_for("1 running", "main")
    shown_page.open(f"jobs/{running.job_id}").wait_for("bar 3", "#lines")
    shown_page.wait_for("more characters", "#lines")
    lines = shown_page.text("#lines").splitlines()
    assert lines[0] == HOSTILE
    assert lines[1] == "link \\x9b\\x00\ufffd".replace("\\x9b", "\ufffd")
    assert lines[2].endswith("… 10,481,760 more characters")
    assert lines[3:] == ["bar 3"]
    assert not shown_page.run("return window.hacked")
    assert shown_page.count("#lines img, #rows img, #head img") == 0
    assert shown_page.complaints() == []


def test_a_job_that_is_removed_while_it_is_looked_at(show, shown_page):
    ref = show.add(1)
    other = show.add(2, display_name="another")
    shown_page.open().wait_for("train", "#rows")
    shown_page.click(f"#row-{ref.job_id}")
    shown_page.wait_for("running", "#head")
    shown_page.wait_for("live", "#link")  # The page is connected now.
    show.backend.phase = show.backend.phase.NOT_FOUND
    index.remove(show.store, ref.job_id)
    shown_page.wait_for("were removed", "#trouble")
    shown_page.wait_for("ended", "#link")
    shown_page.open().wait_for("another", "#rows")
    wait_until(lambda: shown_page.count("#rows > .row") == 1, "the removed job is still listed")
    shown_page.open(f"jobs/{ref.job_id}").wait_for("This page cannot be shown")
    page = shown_page.open()
    wait_until(
        lambda: other.job_id in page.run("return document.body.innerHTML"),
        "the other job is not listed",
    )


@pytest.mark.long
def test_a_store_that_does_not_answer_is_told_of_and_no_job_vanishes(show, shown_page, monkeypatch):
    show.add(1)
    shown_page.open().wait_for("train", "#rows")
    shown_page.wait_for("live", "#link")
    answer, held = index.list_ids, threading.Event()

    def refuse(store):
        raise StoreError("The store is on a disk that was unplugged.")

    monkeypatch.setattr(index, "list_ids", refuse)
    show.add(2)  # Changes the store, so that it is listed again.
    shown_page.wait_for("was unplugged", "#trouble")
    shown_page.wait_for("train", "#rows")

    def hang(store):
        held.wait()
        return answer(store)

    monkeypatch.setattr(index, "list_ids", hang)
    shown_page.wait_for("has not answered for", "#trouble")
    shown_page.wait_for("train", "#rows")
    held.set()
    wait_until(lambda: shown_page.count("#rows > .row") == 2, "the new job is not listed")
    wait_until(lambda: not shown_page.text("#trouble"), "the trouble is over, and still told of")


@pytest.mark.long
def test_a_page_says_that_its_dashboard_is_gone(browser, show):
    show.add(1)
    with serve(show.access) as server:
        page = Page(browser, server.url).open()
        page.wait_for("live", "#link")
        assert page.text("#trouble") == ""
    page.wait_for("not connected", "#link")
    page.wait_for("If it was stopped, start it again", "#trouble")
    browser.get("about:blank")


# -- pages in the frame of a notebook --------------------------------------------------------------


@pytest.fixture
def notebook():
    """A handler whose `html` is served as a page of another origin, like a notebook, and its
    address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(Handler.html.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Handler, f"http://localhost:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("is_framed", [True, False])
def test_a_notebook_shows_the_pages_in_a_frame_and_no_other_site_does(
    browser, show, notebook, is_framed
):
    show.add(1, display_name="in a frame")
    handler, address = notebook
    with serve(show.access, is_framed=is_framed) as server:
        handler.html = server._repr_html_()
        page = Page(browser, address).open()
        browser.switch_to.frame(page.find("iframe"))
        if is_framed:
            page.wait_for("in a frame", "#rows")
            page.wait_for("live", "#link")
        else:
            wait_until(lambda: "frame-ancestors" in "".join(page.complaints()), "it was framed")
            assert page.count("#rows") == 0
        browser.switch_to.default_content()
        browser.get("about:blank")


# -- layout and colours ----------------------------------------------------------------------------


READY = (GangEvent(EventKind.READY, time=2.0),)


@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
def test_pages_fit_and_follow_the_colours_of_the_system(show, shown_page, size):
    ref = show.add(1, hosts=16, accelerator="tpu-v6e-64", display_name="w" * 300, group_id="grp-1")
    show.backend.output[ref.job_id] = [b"y" * 5000 + b"\n"]
    held = show.add(2, display_name="w" * 300, session_name="w" * 300, events=READY)
    show.add(3, place=Place("still", session=held.job_id), display_name="w" * 300, events=READY)
    grounds = []
    for dark in (False, True):
        shown_page.resize(size, dark=dark)
        for path in (
            "",
            f"jobs/{ref.job_id}",
            f"jobs/{held.job_id}",
            "batches",
            "batches/grp-1",
            "capacity",
        ):
            shown_page.open(path).wait_for("kinetic")
            too_wide = shown_page.run(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert too_wide <= 0, path
        ground = "return getComputedStyle(document.body).backgroundColor"
        grounds.append(shown_page.run(ground))
    assert grounds == ["rgb(250, 250, 249)", "rgb(19, 20, 23)"]
