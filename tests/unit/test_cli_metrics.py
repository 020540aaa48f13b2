"""`kinetic jobs metrics` over a store: its text, drawings and files."""

from __future__ import annotations

import csv
import io
import json
import math
from array import array
from pathlib import Path
from typing import Any, NoReturn

import pytest
from test_metrics import frame, write

from kinetic._client import curves
from kinetic._core import layout
from kinetic._core.metrics import NO_STEP, Series
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.local import LocalStore
from kinetic.cli import exit_codes
from kinetic.cli.context import AppContext
from kinetic.cli.root import call

ONE, TWO = "job-00c0ffee", "job-0000beef"
HOSTILE = 'a,b"c'


def no_backend(*_: Any) -> NoReturn:
    raise AssertionError("reading what there is needs no backend")


@pytest.fixture
def app(tmp_path: Path) -> AppContext:
    store = LocalStore(tmp_path / "store")
    for job_id in (ONE, TWO):
        ref = JobRef(job_id, Place("local"), "cpu", "f", "train", 0.0, store.uri, hosts=2)
        (tmp_path / "store" / layout.JobKeys(job_id).prefix).mkdir(parents=True)
        store.put(layout.JobKeys(job_id).ref, json.dumps(ref.to_json()).encode())
    data = [
        frame([0, 1, 2], loss=[3.0, math.nan, 1.0], **{"train/acc": [0.5, math.inf, -math.inf]}),
        frame([0], **{HOSTILE: [0.1]}),
        frame([NO_STEP] * 2, **{"host/memory_bytes": [1 << 20, 1 << 30]}),
    ]
    write(store, tmp_path, b"".join(each.encode() for each in data))
    write(store, tmp_path, frame([0, 1], loss=[5.0, 4.0]).encode(), host=1)
    return AppContext(store, no_backend, no_backend)


def test_a_table_has_the_last_the_least_and_the_greatest(app, capsys):
    assert call(["jobs", "metrics", ONE], app) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["METRIC", "VALUES", "STEP", "LAST", "LEAST", "GREATEST"]
    assert [row.split() for row in rows] == [
        ["loss", "3", "2", "1", "1", "3"],
        ["train/acc", "3", "2", "-inf", "-inf", "inf"],
        [HOSTILE, "1", "0", "0.1", "0.1", "0.1"],
        ["host/memory_bytes", "2", "-", "1.0", "GiB", "1.0", "MiB", "1.0", "GiB"],
    ]


def test_hosts_are_told_apart(app, capsys):
    assert call(["jobs", "metrics", "--all-hosts", "-n", "loss", ONE], app) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["METRIC", "HOST"]
    assert [(row[1], row[4]) for row in rows[1:]] == [("0", "1"), ("1", "4")]


def test_json_keeps_what_json_has_no_number_for(app, capsys):
    assert call(["jobs", "metrics", "--json", ONE], app) == 0
    (job,) = json.loads(capsys.readouterr().out)
    metrics = {each["name"]: each for each in job["metrics"]}
    assert job["job_id"] == ONE
    assert metrics["loss"]["values"] == [3.0, "NaN", 1.0]
    assert metrics["train/acc"]["values"] == [0.5, "Infinity", "-Infinity"]
    assert metrics["loss"]["steps"] == [0, 1, 2]
    assert metrics["host/memory_bytes"]["steps"] == [None, None]
    assert math.isnan(float(metrics["loss"]["values"][1]))


def test_csv_has_a_line_for_each_value(app, capsys):
    assert call(["jobs", "metrics", "--csv", "--all-hosts", ONE], app) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["host"], row["step"], row["value"]) for row in rows if row["name"] == "loss"] == [
        ("0", "0", "3.0"),
        ("0", "1", "nan"),
        ("0", "2", "1.0"),
        ("1", "0", "5.0"),
        ("1", "1", "4.0"),
    ]
    assert [row["value"] for row in rows if row["name"] == HOSTILE] == ["0.1"]
    assert {row["step"] for row in rows if row["name"] == "host/memory_bytes"} == {""}


def test_a_chart_has_the_range_of_each_metric_that_was_asked_for(app, capsys):
    assert call(["jobs", "metrics", "--chart", ONE], app) == 0
    _, chart = capsys.readouterr().out.split("\n\n")
    assert chart.startswith("loss\n")
    assert " 3 |" in chart
    assert " 1 |" in chart
    assert "(step)" in chart
    assert max(map(len, chart.splitlines())) <= 80
    assert "\x1b" not in chart
    names = ["-n", "host/memory_bytes", "-n", "train/acc"]
    assert call(["jobs", "metrics", "--chart", *names, ONE], app) == 0
    assert "1.0 GiB |" in capsys.readouterr().out


def test_a_chart_of_one_value_or_none_is_no_error(app, capsys, tmp_path):
    assert call(["jobs", "metrics", "--chart", "-n", HOSTILE, ONE], app) == 0
    assert HOSTILE in capsys.readouterr().out
    data = frame([0, 1], loss=[math.inf, math.nan]).encode()
    write(app.store, tmp_path, data, attempt=2)
    key = layout.AttemptKeys(ONE, 1).outcome
    app.store.put(key, b'{"verdict": "failed"}')
    assert call(["jobs", "metrics", "--chart", "--attempt", "2", ONE], app) == 0
    assert "nan" in capsys.readouterr().out


@pytest.mark.starts_processes  # matplotlib runs fc-list to find fonts
def test_a_picture_has_a_chart_for_each_metric(app, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("loss.png", "loss.svg"):
        assert call(["jobs", "metrics", "--plot", str(tmp_path / name), ONE, TWO], app) == 0
        assert "Wrote 3 charts to" in capsys.readouterr().err
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "</svg>" in (tmp_path / "loss.svg").read_text()
    for place in ("loss.nonsense", "no/such/folder/loss.png"):
        code = call(["jobs", "metrics", "--plot", str(tmp_path / place), ONE], app)
        assert code == exit_codes.USAGE
        assert "cannot be written" in capsys.readouterr().err


def test_tensorboard_reads_what_was_written(app, capsys, tmp_path):
    pytest.importorskip("tensorboardX")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # The second call replaces the first one's files.
        assert call(["jobs", "metrics", "--tensorboard", str(tmp_path / "runs"), ONE], app) == 0
        assert "Wrote 9 values to" in capsys.readouterr().err
    events = reading.EventAccumulator(str(tmp_path / "runs" / ONE)).Reload()
    points = [(each.step, each.value) for each in events.Scalars("loss")]
    assert [step for step, _ in points] == [0, 1, 2]
    assert (points[0][1], points[2][1]) == (3.0, 1.0)
    assert math.isnan(points[1][1])
    assert events.Scalars("loss")[0].wall_time == 1000.0
    assert "train/acc" in events.Tags()["scalars"]
    assert [each.value for each in events.Scalars("host/memory_bytes")] == [1 << 20, 1 << 30]
    assert call(["jobs", "metrics", "--tensorboard", str(tmp_path), "--all-hosts", ONE], app) == 0
    other = reading.EventAccumulator(str(tmp_path / ONE / "host-1")).Reload()
    assert [each.value for each in other.Scalars("loss")] == [5.0, 4.0]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--json", "--csv"], exit_codes.USAGE, "either --json or --csv"),
        (["--host", "2"], exit_codes.USAGE, "There is no host 2: job-00c0ffee has hosts 0 to 1."),
        (["--attempt", "2"], exit_codes.USAGE, "has no attempt 2"),
        (
            ["--name", "lost"],
            0,
            "No metric of this name was logged. The metrics are: loss, train/acc",
        ),
        (
            ["--plot", "x.png", "--name", "lost"],
            exit_codes.USAGE,
            "No metric of this name was logged",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(app, capsys, options, code, words):
    assert call(["jobs", "metrics", *options, ONE], app) == code
    assert words in capsys.readouterr().err


def test_names_that_are_there_include_what_follows_from_others(app, capsys, tmp_path):
    write(app.store, tmp_path, frame([2, 4], step_time_s=[0.5, 0.25]).encode(), host=1)
    assert call(["jobs", "metrics", "--all-hosts", "--name", "lost", ONE], app) == 0
    assert "step_time_s, steps_per_s" in capsys.readouterr().err
    assert call(["jobs", "metrics", "--all-hosts", "--name", "steps_per_s", ONE], app) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "4"


def test_a_job_that_logged_nothing_says_how_to(app, capsys):
    assert call(["jobs", "metrics", TWO], app) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Log them in the function: kinetic.log(step=step, loss=loss)" in printed.err


def test_hostile_names_do_not_steer_the_terminal(app, capsys, tmp_path):
    write(app.store, tmp_path, frame([0], **{"\x1b[31mred": [1.0]}).encode(), host=1)
    for options in (["--chart"], ["--chart", "-n", "\x1b[31mred"]):
        assert call(["jobs", "metrics", "--host", "1", *options, ONE], app) == 0
        assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("values", [[1e308, -1e308] * 4, [5e-324 * n for n in range(9)]])
def test_values_beyond_any_scale_are_told_and_not_drawn(values):
    columns = [[*range(len(values))], [0.0] * len(values), values, [1] * len(values)]
    curve = curves.Curve("job-1", Series("loss", 0, *(array("d", each) for each in columns)))
    chart = curves.draw_text("loss", [curve], width=80, height=10, color=False)
    assert chart.startswith("loss")
