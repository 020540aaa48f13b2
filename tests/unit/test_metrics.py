"""The metrics of jobs, as they are stored and read."""

from __future__ import annotations

import json
import math
import random
from array import array
from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore

from kinetic._client.metrics import Metrics, MetricsReader
from kinetic._core import layout
from kinetic._core.metrics import (
    LONGEST_LINE_BYTES,
    NO_STEP,
    Recording,
    RowDecoder,
    Rows,
    Series,
)
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.base import Store, folder_of
from kinetic._store.local import LocalStore
from kinetic._store.log_segments import SegmentWriter

JOB = "job-00c0ffee"


def frame(steps, *, time=1000.0, **columns) -> Rows:
    times = array("d", [time + n for n in range(len(steps))])
    values = [array("d", column) for column in columns.values()]
    return Rows(tuple(columns), times, array("q", steps), values)


def ref_to(store: Store, hosts: int = 1) -> JobRef:
    return JobRef(JOB, Place("local"), "cpu", "train", "train", 0.0, store.uri, hosts=hosts)


@pytest.fixture(params=["folder", "objects"])
def store(request, tmp_path) -> Store:
    if request.param == "folder":
        return LocalStore(tmp_path / "store")
    return MemoryStore(delay_s=0.0)


def write(store: Store, tmp_path: Path, data: bytes, *, attempt: int = 1, host: int = 0) -> None:
    """Append encoded rows to a host's metrics, as a function and its agent do."""
    key = layout.HostKeys(JOB, attempt, host).metrics
    folder = folder_of(store)
    path = (
        tmp_path / f"agent-{attempt}-{host}-{random.random()}" if folder is None else folder / key
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)
    if folder is None:
        SegmentWriter(store, key, (path, path.with_suffix(".idx"))).close()


# -- rows as lines of bytes ------------------------------------------------------------------------


def test_lines_hold_what_was_logged_to_the_bit():
    odd = [0.1, -0.0, math.inf, -math.inf, 1e-310, math.nan]
    sent = frame(range(6), loss=odd, **{"é/träin loss": odd[::-1]})
    (rows,) = RowDecoder().feed(sent.encode())
    assert rows.names == sent.names
    assert [column.tobytes() for column in (rows.times, rows.steps, *rows.values)] == [
        column.tobytes() for column in (sent.times, sent.steps, *sent.values)
    ]


def test_any_tool_can_read_a_line():
    line = frame([7], time=1732800000.25, loss=[0.5]).encode()
    values = {"loss": [0.5]}
    assert json.loads(line) == {"times": [1732800000.25], "steps": [7], "values": values}
    assert line.endswith(b"}\n")


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_read_in_pieces_of_any_length(seed):
    chance = random.Random(seed)
    sent = [frame([n, n + 1], loss=[n, 1.5]) for n in range(30)]
    data, at = b"".join(each.encode() for each in sent), 0
    decoder, rows = RowDecoder(), []
    while at < len(data):
        size = chance.choice((1, 3, 7, 50, 400))
        rows += decoder.feed(data[at : at + size])
        at += size
    assert steps_of(rows) == steps_of(sent)


@pytest.mark.parametrize("seed", range(40))
def test_damage_costs_the_line_that_it_hits(seed):
    chance = random.Random(seed)
    sent = [frame([n], loss=[n]) for n in range(12)]
    parts = [each.encode() for each in sent]
    hit = chance.randrange(1, 10)
    at = chance.randrange(len(parts[hit]) - 1)
    kind = chance.choice(("flip", "cut", "grow"))
    if kind == "flip":
        parts[hit] = parts[hit][:at] + bytes([parts[hit][at] ^ 0xFF]) + parts[hit][at + 1 :]
    elif kind == "cut":  # The line is cut, as on a full disk.
        parts[hit] = parts[hit][:at] + b"\n"
    else:
        parts[hit] = parts[hit][:at] + b"KMF" + parts[hit][at:]
    rows = RowDecoder().feed(b"".join(parts))
    assert [n for n in steps_of(rows) if n != hit] == [n for n in range(12) if n != hit]


@pytest.mark.parametrize(
    "odd",
    [
        frame([1, 2], time=-1e9, loss=[1, 2]).encode(),
        frame([1, 2], time=1e13, loss=[1, 2]).encode(),
        frame([-2, 2], loss=[1, 2]).encode(),
        frame([1, 2], **{"x" * 201: [1, 2]}).encode(),
        frame([1, 2], **{"": [1, 2]}).encode(),
        b'{"times":[NaN],"steps":[1],"values":{"loss":[1]}}\n',
        b'{"times":[1],"steps":[1],"values":{"loss":[1,2]}}\n',
        b'{"times":[1],"steps":[1,2],"values":{"loss":[1]}}\n',
        b'{"times":[1],"steps":[1],"values":{"loss":["1"]}}\n',
        b'{"times":[1],"steps":[1.5],"values":{"loss":[1]}}\n',
        b'{"times":[1],"steps":[9223372036854775808],"values":{"loss":[1]}}\n',
        b'{"times":[1],"steps":[1],"values":[1]}\n',
        b'{"times":[1],"steps":[1]}\n',
        b'{"times":1,"steps":1,"values":{"loss":1}}\n',
        b"[]\n7\nnull\n\n\xff\xfe\n" + b"[" * 100_000 + b"\n",
    ],
)
def test_lines_that_nobody_should_write_are_passed_over(odd):
    before, after = (frame([step], loss=[step]).encode() for step in (6, 7))
    assert steps_of(RowDecoder().feed(before + odd + after)) == [6, 7]


def test_a_line_without_end_does_not_fill_the_memory():
    decoder = RowDecoder()
    for _ in range(5):
        assert decoder.feed(b"x" * LONGEST_LINE_BYTES) == []
    assert len(decoder._rest) <= LONGEST_LINE_BYTES
    assert steps_of(decoder.feed(b"\n" + frame([7], loss=[7]).encode())) == [7]


def test_rows_of_many_names_are_lines_that_readers_take():
    names = {f"{number:0200}": [1.0] * 50 for number in range(10_000)}
    lines = frame(range(50), **names).encode().splitlines()
    assert max(map(len, lines)) < LONGEST_LINE_BYTES


def test_a_name_steers_no_terminal():
    (rows,) = RowDecoder().feed(frame([1], **{"\x1b[2J\u202eloss": [1]}).encode())
    assert rows.names == ("\ufffd[2J\ufffdloss",)


def steps_of(parts: list[Rows]) -> list[int]:
    return [step for rows in parts for step in rows.steps]


# -- rows combined into series ---------------------------------------------------------------------


def record(*parts: tuple[int, int, Rows]) -> Recording:
    recording = Recording()
    for attempt, host, each in parts:
        recording.add(host, attempt, each)
    return recording


def points(series: Series) -> list[tuple[int, float]]:
    return list(zip(series.steps, series.values, strict=True))


def test_a_step_that_was_trained_twice_shows_once_and_twice_on_request():
    recording = record(
        (1, 0, frame(range(6), loss=[9, 8, 7, 6, 5, 4])),
        (2, 0, frame([3, 4], loss=[6.5, 5.5])),
    )
    (loss,) = recording.series()
    assert points(loss) == [(0, 9), (1, 8), (2, 7), (3, 6.5), (4, 5.5)]
    assert list(loss.attempts) == [1, 1, 1, 2, 2]
    (both,) = recording.series(repeats=True)
    assert list(both.steps) == [0, 1, 2, 3, 4, 5, 3, 4]
    assert list(both.attempts) == [1] * 6 + [2] * 2


def test_metrics_that_count_differently_do_not_hide_each_other():
    recording = record(
        (1, 0, frame([100, 200], loss=[2, 1])),
        (1, 0, frame([1, 2], accuracy=[0.5, 0.6])),
        (2, 0, frame([200, 300], loss=[1.5, 1])),
        (2, 0, frame([2], accuracy=[0.7])),
    )
    loss, accuracy = recording.series()
    assert points(loss) == [(100, 2), (200, 1.5), (300, 1)]
    assert points(accuracy) == [(1, 0.5), (2, 0.7)]


def test_a_host_with_another_number_in_a_later_attempt_hides_what_was_lost():
    recording = record(
        (1, 0, frame([0, 1, 2], loss=[3, 2, 1])),
        (1, 1, frame([0, 1, 2], loss=[33, 22, 11])),
        (2, 0, frame([1, 2], loss=[2.5, 1.5])),
    )
    leader, other = recording.series()
    assert points(leader) == [(0, 3), (1, 2.5), (2, 1.5)]
    assert points(other) == [(0, 33)]


def test_the_last_value_of_a_step_counts_within_an_attempt():
    (loss,) = record((1, 0, frame([5, 6, 5, 7], loss=[1, 2, 3, 4]))).series()
    assert points(loss) == [(5, 3), (6, 2), (7, 4)]


def test_a_step_time_tells_the_rate_unless_the_function_does():
    steps = frame([1, 2], step_time_s=[0.5, 0.0])
    assert [each.name for each in record((1, 0, steps)).series()] == ["step_time_s", "steps_per_s"]
    assert list(record((1, 0, steps)).series()[1].values) == [2.0, math.inf]
    named = frame([1], step_time_s=[0.5], steps_per_s=[7.0])
    assert [list(each.values) for each in record((1, 0, named)).series()] == [[0.5], [7.0]]


def test_figures_without_a_step_are_kept_in_all_attempts():
    figures = frame([NO_STEP] * 2, **{"host/memory_bytes": [1, 2]})
    (memory,) = record((1, 0, figures), (2, 0, figures)).series()
    assert list(memory.values) == [1, 2, 1, 2]
    assert not memory.has_steps


def test_decimation_keeps_peaks_ends_and_what_is_no_number():
    values = [math.sin(n / 1000) for n in range(100_000)]
    values[31_234], values[77_777], values[50_001] = 50.0, -50.0, math.nan
    (series,) = record((1, 0, frame(range(100_000), loss=values))).series()
    few = series.decimate(500)
    assert len(few) <= 600
    assert {0, 31_234, 50_001, 77_777, 99_999} <= set(few.steps)
    assert list(few.steps) == sorted(few.steps)
    assert series.decimate(200_000) is series


# -- metrics read from a store ---------------------------------------------------------------------


def read_metrics(store, ref, **options):
    reader = MetricsReader(store, ref, **options)
    reader.read_new()
    return reader.recording.series()


def test_metrics_are_read_from_any_store(store, tmp_path):
    data = b"".join(frame([n], loss=[n], rate=[2 * n]).encode() for n in range(100))
    write(store, tmp_path, data)
    loss, rate = read_metrics(store, ref_to(store))
    assert points(loss) == [(n, n) for n in range(100)]
    assert points(rate) == [(n, 2 * n) for n in range(100)]


def test_a_reader_goes_on_where_it_was_through_attempts(store, tmp_path):
    reader = MetricsReader(store, ref_to(store))
    assert not reader.read_new()
    one, two = frame([0, 1], loss=[3, 2]).encode(), frame([2], loss=[1]).encode()
    write(store, tmp_path, one + two[:10])
    assert reader.read_new()
    assert not reader.read_new()
    verdict = Outcome(Verdict.FAILED).to_json()
    store.put(layout.AttemptKeys(JOB, 1).outcome, json.dumps(verdict).encode())
    write(store, tmp_path, frame([1, 2], loss=[2.5, 1.5]).encode(), attempt=2)
    assert reader.read_new()
    (loss,) = reader.recording.series()
    assert points(loss) == [(0, 3), (1, 2.5), (2, 1.5)]


def test_hosts_are_read_apart(store, tmp_path):
    for host in range(3):
        write(store, tmp_path, frame([7], loss=[host]).encode(), host=host)
    ref = ref_to(store, hosts=3)
    assert [points(each) for each in read_metrics(store, ref)] == [[(7, 0)]]
    assert [each.host for each in read_metrics(store, ref, hosts=None)] == [0, 1, 2]
    assert [each.host for each in read_metrics(store, ref, hosts=(2,))] == [2]


def test_a_job_that_has_logged_nothing_has_no_metrics(store):
    assert read_metrics(store, ref_to(store)) == []


def test_a_million_steps_are_read(store, tmp_path):
    rows = 1000
    data = b"".join(
        frame(range(n, n + rows), loss=[1.0] * rows).encode() for n in range(0, 1_000_000, rows)
    )
    write(store, tmp_path, data)
    (loss,) = read_metrics(store, ref_to(store))
    assert len(loss) == 1_000_000
    assert loss.steps[-1] == 999_999


def test_ten_thousand_names_are_read(store, tmp_path):
    names = {f"layer-{n}/gradient": [float(n)] for n in range(10_000)}
    write(store, tmp_path, frame([3], **names).encode())
    series = read_metrics(store, ref_to(store))
    assert [one.name for one in series] == list(names)


# -- metrics as users get them ---------------------------------------------------------------------


def test_users_get_arrays_by_name():
    np = pytest.importorskip("numpy")
    recording = record((1, 0, frame([0, 10], loss=[2, 1])), (1, 1, frame([0], loss=[5])))
    metrics = Metrics(JOB, recording.series())
    assert list(metrics) == ["loss"]
    assert "accuracy" not in metrics
    loss = metrics["loss"]
    assert np.array_equal(loss.steps, [0, 10])
    assert np.array_equal(np.asarray(loss), [2, 1])
    assert np.mean(loss) == 1.5
    assert [each.host for each in metrics.all] == [0, 1]
    assert "the last is 1 at step 10" in repr(loss)
    assert repr(Metrics(JOB, [])) == f"<Metrics of {JOB}: nothing was logged>"


def test_a_data_frame_has_steps_and_names():
    pd = pytest.importorskip("pandas")
    recording = record(
        (1, 0, frame([0, 10], loss=[2, 1])),
        (1, 0, frame([10], accuracy=[0.5])),
        (1, 0, frame([NO_STEP], **{"host/memory_bytes": [1]})),
    )
    table = Metrics(JOB, recording.series()).to_pandas()
    assert list(table.columns) == ["loss", "accuracy"]
    assert table.index.name == "step"
    assert table.loc[10, "loss"] == 1
    assert pd.isna(table.loc[0, "accuracy"])
    recording.add(1, 1, frame([0], loss=[5]))
    assert Metrics(JOB, recording.series()).to_pandas().loc[(1, 0), "loss"] == 5
    assert Metrics(JOB, []).to_pandas().empty
