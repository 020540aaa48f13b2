"""Drawings of jobs: well formed, escaped, bounded, readable without styles, without external
resources."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laptop_fakes import NOW, plan, ref

from kinetic._client.board import drawing, shape
from kinetic._client.plan_view import PlanView
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, judge

VOID = {"br", "img", "hr", "input", "meta", "link"}


class Page(HTMLParser):
    """A parser that checks that tags nest, and collects texts, tags and attributes."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.words, self.tags, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in VOID
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def picture(accelerator="tpu-v6e-16", slices=1, states=None, **more):
    topology = resolve(accelerator)
    hosts = states or ("running",) * (slices * topology.hosts)
    return drawing.Picture(
        "train", ("job-00000001", accelerator), "running", topology, tuple(hosts), **more
    )


# -- pictures --------------------------------------------------------------------------------------


def test_every_host_is_written_out_and_has_its_chips():
    page = Page(drawing.html(picture(states=["running", "returned", "failed", "pending"])))
    for host in ("0 running", "1 returned", "2 failed", "3 pending"):
        assert host in page.text
    assert "tpu-v6e-16 · 4x4 · 4 hosts: 1 running, 1 returned, 1 failed, 1 pending" in page.text
    squares = [
        value for name, value in page.attributes if name == "style" and "inline-block" in value
    ]
    assert len(squares) == 16


def test_slices_are_drawn_apart():
    page = Page(drawing.html(picture("tpu-v6e-8", slices=3)))
    assert [s for s in ("slice 0", "slice 1", "slice 2", "slice 3") if s in page.text] == [
        "slice 0",
        "slice 1",
        "slice 2",
    ]
    assert "5 running" in page.text, "hosts are numbered over all slices"


@given(title=st.text(max_size=40), fact=st.text(max_size=20), row=st.text(max_size=30))
def test_names_with_html_are_escaped(title, fact, row):
    drawn = dataclasses.replace(picture(), title=title, facts=(fact,), rows=((row, title),))
    page = Page(drawing.html(drawn))
    assert set(page.tags) <= {"div", "b", "span", "table", "tr", "th", "td"}
    assert " ".join(title.split()) in page.text or "\\r" in title or not title.isprintable()


def test_a_script_stays_text():
    drawn = dataclasses.replace(
        picture(), title='<script>alert("x")</script>', facts=('"onmouseover="x',)
    )
    html = drawing.html(drawn)
    assert "<script" not in html
    assert '<script>alert("x")</script>' in Page(html).text
    assert not [name for name, _ in Page(html).attributes if name.startswith("on")]


def test_nothing_comes_from_elsewhere_and_text_keeps_the_colour_of_its_surroundings():
    html = drawing.html(
        picture(
            states=["running", "failed", "stopped", "joined"], rows=(("reason", "host 1 died"),)
        )
    )
    assert not re.search(r"https?:|url\(|<style|<script|<link|<img|@import|src=|href=", html)
    coloured = re.findall(r'<span style="color:[^"]*">([^<]*)</span>', html)
    assert set(coloured) <= {"●"}, "only the dot is coloured, never words"
    assert not re.search(r"background:(white|black|#fff|#000)", html)


@pytest.mark.parametrize(
    ("accelerator", "slices", "hosts"),
    [("tpu-v6e-256", 1, 64), ("tpu-v6e-256", 8, 512), ("tpu-v6e-256", 40, 2560)],
)
def test_large_gangs_stay_small(accelerator, slices, hosts):
    html = drawing.html(picture(accelerator, slices))
    assert len(html) < 250_000
    page = Page(html)
    assert ("and 1,536 more hosts" in page.text) == (hosts == 2560)
    if hosts > 64:
        assert ("title", "host 511: running") in page.attributes


def test_an_accelerator_of_a_later_version_has_hosts_without_chips():
    unknown = drawing.of_job(
        dataclasses.replace(ref(), accelerator="tpu-v99-16"), "running", [], None, NOW
    )
    page = Page(drawing.html(unknown))
    assert "3 pending" in page.text
    assert "inline-block" not in drawing.html(unknown)


# -- states ----------------------------------------------------------------------------------------


def test_the_verdict_says_how_each_host_ended():
    reports = [
        HostReport(0, Exit.RETURNED),
        HostReport(1, Exit.SIGNAL),
        HostReport(2, Exit.STOPPED),
        HostReport(3, Exit.CANCELLED),
    ]
    outcome = judge(4, reports, blamed=(1,), now=NOW + 5)
    drawn = drawing.of_job(ref(), "failed", [], outcome, NOW + 1000)
    assert drawn.hosts == ("returned", "failed", "stopped", "stopped")
    assert "5.0s" in drawn.facts, "an ended job shows how long it took"
    assert "host 1" in Page(drawing.html(drawn)).text


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_shows_the_state_of_each_input():
    page = Page(drawing.batch_html("sweep", ("grp-00000001",), ["running", "waiting"]))
    assert "sweep · grp-00000001 · 2 inputs: 1 running, 1 waiting" in page.text
    assert ("title", "input 0: running") in page.attributes
    assert ("title", "input 1: waiting") in page.attributes


def test_a_large_batch_stays_small_and_hides_no_failure():
    html = drawing.batch_html("<b>", (), ["failed" if n == 7 else "live" for n in range(3000)])
    page = Page(html)
    assert len(html) < 200_000
    assert ("title", "input 7: failed") in page.attributes
    assert "and 1,976 more inputs" in page.text
    assert "2,999 live, 1 failed" in page.text


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_is_drawn_with_what_it_says_as_text():
    view = PlanView(plan(), ({"kind": "JobSet"},), ("big <tree>",))
    page = Page(view._repr_html_())
    assert "Plan of train" in page.text
    assert "3 planned" in page.text
    assert "big <tree>" in page.text
    for line in repr(view).splitlines()[1:]:
        assert " ".join(line.split()) in page.text


@pytest.mark.parametrize("accelerator", ["tpu-v6e-32", "tpu-v6e-256", "gpu-h100x8"])
def test_a_drawing_wraps_in_a_narrow_cell(accelerator):
    drawn = drawing.html(picture(accelerator))
    assert "overflow-wrap:anywhere" in drawn  # Long names must wrap.
    # Boxes wrap, but a grid of many columns would not.
    assert not re.search(r"repeat\(\d+,max-content\);gap:6px", drawn)
    widths = [int(width) for width in re.findall(r"min-width:(\d+)px", drawn)]
    assert widths
    assert max(widths) < 200


def test_a_single_controller_has_all_chips():
    def squares(controller):
        of_job = {"accelerator": "tpu-v6e-8", "hosts": 1, "has_single_controller": controller}
        job = dataclasses.replace(ref(), **of_job)
        return drawing.html(drawing.of_job(job, "running", (), None, NOW)).count("9px;height:9px")

    assert (squares(False), squares(True)) == (4, 8)
    view = PlanView(plan(options={"controller": "single"}), ())
    assert "1 x 16 (single controller x devices; tpu 4x4)" in repr(view)
    assert view._repr_html_().count("9px;height:9px") == 16


@pytest.mark.parametrize(
    ("slices", "words"),
    [(1, ""), (3, "3 slices of "), ((2, 3), "2 to 3 slices of "), ((2, 2), "2 slices of ")],
)
def test_a_single_controller_names_its_slices(slices, words):
    of_job = {"accelerator": "tpu-v6e-8", "hosts": 1, "has_single_controller": True}
    job = dataclasses.replace(ref(), **of_job)
    assert shape.describe_shape(job, slices) == f"{words}tpu-v6e-8 (single controller)"
