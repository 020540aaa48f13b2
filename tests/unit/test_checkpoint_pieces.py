"""Local checkpoints, whose pieces lie on several hosts: finding a complete step, planning transfers
between hosts, and free space."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from kinetic._in_job.checkpoint.pieces import Local, Piece, find_newest, overlap, plan_transfers
from kinetic._in_job.checkpoint.tree import Leaf
from kinetic._system import machine
from kinetic.errors import CorruptRecord

LEAVES = (Leaf("w", (4,), "float32"), Leaf("n", value=3))


def local(step, *halves, writer="run"):
    """Return one host's part of a checkpoint, with these halves (0, 1) of the array `w`."""
    pieces = [Piece(0, (half * 2,), (2,), 64 * half, 8) for half in halves]
    return Local(step, writer, 2, LEAVES, tuple(pieces))


@pytest.mark.parametrize(
    ("listings", "step"),
    [
        ([[], []], None),
        ([[local(1, 0)], [local(1, 1)]], 1),
        ([[local(1, 0)], []], None),
        ([[local(1, 0, 1)], []], 1),
        ([[local(1, 0), local(2, 0)], [local(1, 1)]], 1),
        ([[local(1, 0), local(2, 0)], [local(1, 1), local(2, 1)]], 2),
        ([[local(2, 0)], [local(2, 1, writer="another")]], None),
        ([[local(2, 0), local(1, 0)], [local(2, 1, writer="another"), local(1, 1)]], 1),
        ([[local(1, 0)], [local(1, 1)], [local(1, 0)], [local(1, 1)]], 1),
    ],
)
def test_the_newest_step_that_is_whole(listings, step):
    whole = find_newest(listings)
    assert (whole and whole.step) == step


def test_a_piece_is_sent_once_to_all_who_need_it():
    whole = find_newest([[local(1, 0)], [local(1, 1)], []])
    halves = [((0,), (2,)), ((2,), (2,))]
    mine = {0: {halves[0]}, 1: {halves[1]}, 2: {halves[0]}}
    assert [
        (j.source, j.piece.start, set(j.needed_by)) for j in plan_transfers(whole, [mine, {}], 3)
    ] == [(0, (0,), {2})]
    everything = {-1: {((0,), (4,))}}
    jobs = [(j.source, set(j.needed_by)) for j in plan_transfers(whole, [everything, {}], 3)]
    assert jobs == [(0, {1, 2}), (1, {0, 2})]


def test_nothing_is_sent_where_everybody_has_what_it_needs():
    whole = find_newest([[local(1, 0)], [local(1, 1)]])
    assert plan_transfers(whole, [{0: {((0,), (2,))}, 1: {((2,), (2,))}}, {}], 2) == []


@st.composite
def cut(draw):
    """Draw two partitions of a square into boxes, and the hosts that have or need each box."""
    size = 6

    def cuts():
        return [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))), size]

    def boxes():
        rows, columns = cuts(), cuts()
        return [
            ((r, c), (r2 - r, c2 - c))
            for r, r2 in itertools.pairwise(rows)
            for c, c2 in itertools.pairwise(columns)
        ]

    hosts = draw(st.integers(1, 4))
    saved, wanted = boxes(), boxes()
    having = [draw(st.sets(st.integers(0, hosts - 1), min_size=1)) for _ in saved]
    needing = [draw(st.integers(0, hosts - 1)) for _ in wanted]
    return hosts, saved, having, wanted, needing


@hypothesis.given(cut())
def test_after_the_transfers_every_host_can_build_what_it_needs(case):
    hosts, saved, having, wanted, needing = case
    leaves = (Leaf("w", (6, 6), "uint8"),)
    listings = [
        [
            Local(
                1,
                "run",
                hosts,
                leaves,
                tuple(
                    Piece(0, start, shape, 64 * n, shape[0] * shape[1])
                    for n, (start, shape) in enumerate(saved)
                    if host in having[n]
                ),
            )
        ]
        for host in range(hosts)
    ]
    whole = find_newest(listings)
    needed = {}
    for host, box in zip(needing, wanted, strict=True):
        needed.setdefault(host, set()).add(box)
    sent = plan_transfers(whole, [needed], hosts)
    for host, boxes in needed.items():
        own = [s for n, s in enumerate(saved) if host in having[n]]
        own += [(j.piece.start, j.piece.shape) for j in sent if host in j.needed_by]
        for box in boxes:
            parts = [o for each in own if (o := overlap(each, box))]
            assert sum(shape[0] * shape[1] for _, shape in parts) == box[1][0] * box[1][1]
    assert all(j.piece.start in [p.start for p in whole.on[j.source].pieces] for j in sent)


def test_an_index_is_read_as_it_was_written():
    index = local(7, 0, 1)
    assert Local.from_json(index.to_json()) == index


@pytest.mark.parametrize("damage", [{}, {"format": 2}, {"format": 1, "step": "x"}])
def test_a_damaged_index_is_told(damage):
    with pytest.raises(CorruptRecord):
        Local.from_json(damage)


# -- file systems --------------------------------------------------------------------------------


def test_the_type_of_a_file_system_is_read_from_the_mounts(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        f"2 1 0:2 / {tmp_path}/memory rw - tmpfs tmpfs rw\n"
        f"3 1 0:3 / {tmp_path}/shared rw - nfs4 server:/x rw\n"
    )
    assert machine.is_memory_folder(tmp_path / "memory/below", mounts)
    assert not machine.is_memory_folder(tmp_path, mounts)
    assert machine.is_shared_folder(tmp_path / "shared", mounts)
    assert not machine.is_shared_folder(tmp_path / "memory", mounts)
