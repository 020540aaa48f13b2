"""Reading the compiler's HLO text: padded arrays, loops, operations, device groups, user lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kinetic._compile import costs, hlo
from kinetic._compile.hlo import Array
from kinetic._compile.report import CompileReport, CompileVerdict, MemoryUse, summarize
from kinetic._compile.routes import DeviceLayout, name_axes_between

TEXTS = Path(__file__).parent / "hlo"
ON_2_BY_2 = DeviceLayout(
    (("data", 2), ("fsdp", 2), ("tensor", 2)), (0, 1, 2, 3), (0,) * 4, "data", 2
)


def cost_nothing(*_: object) -> float:
    return 0.0


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    return hlo.read((TEXTS / "loop.hlo").read_text())


def test_a_loop_runs_from_where_its_counter_begins_to_its_limit(module: hlo.Module) -> None:
    runs = costs.count_runs(module, cost_nothing)
    assert (runs["main"], runs["body"], runs["multiply"], runs["take"]) == (1, 5, 5, 5)
    assert "add" not in runs


@pytest.mark.parametrize(
    ("written", "otherwise", "times"),
    [
        ("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(2)", 3),  # 1, 3, 5
        ("add(%at, %one)", "add(%one, %at)", 5),
        ("add(%at, %one)", "multiply(%at, %one)", 1),
        ("add(%at, %one)", "add(%at, %at)", 1),
        ("%first = s32[]{:T(128)} constant(1)", "%first = s32[]{:T(128)} parameter(2)", 1),
        ("%six = s32[]{:T(128)} constant(6)", "%six = s32[]{:T(128)} parameter(1)", 1),
    ],
)
def test_a_loop_counts_by_what_each_run_adds_and_once_where_data_decide(
    written: str, otherwise: str, times: int
) -> None:
    text = (TEXTS / "loop.hlo").read_text()
    assert written in text
    read = hlo.read(text.replace(written, otherwise))
    assert costs.count_runs(read, cost_nothing)["body"] == times


def test_what_a_loop_computes_counts_each_time(module: hlo.Module) -> None:
    assert costs.count_flops(module) == 5 * 2 * 256 * 512 * 1024


def test_a_slice_of_an_array_costs_the_slice(module: hlo.Module) -> None:
    layer, hidden, product = 512 * 1024 * 2, 256 * 512 * 2, 256 * 1024 * 2
    sliced = 2 * layer  # read from the stacked layers, written to a new array
    multiplied = hidden + layer + product
    gathered = product + 1024 * 1024 * 2
    counted = costs.count_bytes(module)
    small = 5 * 5 * 512  # the counters of a loop
    assert 0 <= counted - 5 * (sliced + multiplied + gathered) <= small


ASYNC = """HloModule m

%part (whole: s8[67108864]) -> s8[4194304] {
  %whole = s8[67108864]{0} parameter(0)
  ROOT %slice.1 = s8[4194304]{0:S(1)} slice(%whole), slice={[37748736:41943040]}
}

%put (old: s8[67108864], new: s8[4194304], at: s32[]) -> s8[67108864] {
  %old = s8[67108864]{0} parameter(0)
  %new = s8[4194304]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %update.1 = s8[67108864]{0} dynamic-update-slice(%old, %new, %at)
}

ENTRY %main (p: s8[67108864], q: s8[4194304], i: s32[]) -> s8[67108864] {
  %p = s8[67108864]{0} parameter(0)
  %q = s8[4194304]{0} parameter(1)
  %i = s32[] parameter(2)
  %get = ((s8[67108864]{0}), s8[4194304]{0:S(1)}, s32[]{:S(2)}) async-start(%p), calls=%part
  %got = s8[4194304]{0:S(1)} async-done(%get)
  %set = ((s8[67108864]{0}, s8[4194304]{0}, s32[]), s8[67108864]{0}, u32[]) async-start(%p, %q, %i), calls=%put
  %midway = ((s8[67108864]{0}, s8[4194304]{0}, s32[]), s8[67108864]{0}, u32[]) async-update(%set)
  ROOT %done = s8[67108864]{0} async-done(%midway)
}
"""  # noqa: E501


def test_parts_that_are_moved_meanwhile_cost_the_parts() -> None:
    read = hlo.read(ASYNC)
    part = 4 << 20
    read_and_put = part + (part + part)  # to the scratchpad; then from memory to memory
    assert costs.count_bytes(read) == pytest.approx(read_and_put, rel=1e-5)
    assert {each.what for each in costs.find_buffers(read, 9)} <= {
        "argument ",
        "dynamic-update-slice",
    }


SCATTER = """HloModule m

%put (table: f32[4096,1024], at: s32[64], rows: f32[64,1024]) -> f32[4096,1024] {
  %table = f32[4096,1024]{1,0} parameter(0)
  %at = s32[64]{0} parameter(1)
  %rows = f32[64,1024]{1,0} parameter(2)
  ROOT %set = f32[4096,1024]{1,0} scatter(%table, %at, %rows), to_apply=%add
}

ENTRY %main (p: f32[4096,1024], i: s32[64], x: f32[64,1024], q: f32[32,1024]) -> f32[4096,1024] {
  %p = f32[4096,1024]{1,0} parameter(0)
  %i = s32[64]{0} parameter(1)
  %x = f32[64,1024]{1,0} parameter(2)
  %q = f32[32,1024]{1,0} parameter(3)
  %fused = f32[4096,1024]{1,0} fusion(%p, %i, %x), kind=kCustom, calls=%put
  %bare = (f32[32,1024]{1,0}, f32[32,1024]{1,0}) scatter(%q, %q, %i, %x, %x), to_apply=%add
  ROOT %out = f32[4096,1024]{1,0} scatter(%fused, %i, %x), to_apply=%add
}
"""


def test_a_scatter_costs_its_updates_and_indices_not_the_array() -> None:
    rows, indices = 64 * 1024 * 4, 64 * 4
    into_table = rows + indices + rows
    into_two_small_ones = rows + rows + indices + rows // 2 + rows // 2
    counted = costs.count_bytes(hlo.read(SCATTER))
    assert counted == 2 * into_table + into_two_small_ones


BRANCHES = """HloModule m

%multiply (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  %sent = f32[1024,1024]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %made = f32[1024,1024]{1,0} dot(%sent, %sent), lhs_contracting_dims={1}, metadata={op_name="f/dot"}
}

%twice (y: f32[1024,1024]) -> f32[1024,1024] {
  %y = f32[1024,1024]{1,0} parameter(0)
  %one = f32[1024,1024]{1,0} sine(%y), metadata={op_name="f/sin"}
  ROOT %two = f32[1024,1024]{1,0} cosine(%one)
}

ENTRY %main (c: pred[], a: f32[1024,1024]) -> f32[1024,1024] {
  %c = pred[] parameter(0)
  %a = f32[1024,1024]{1,0} parameter(1)
  ROOT %out = f32[1024,1024]{1,0} conditional(%c, %a, %a), CHOICE
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "choice",
    [
        "branch_computations={%multiply, %twice}",
        "branch_computations={%twice, %multiply}",
        "true_computation=%multiply, false_computation=%twice",
        "true_computation=%twice, false_computation=%multiply",
    ],
)
def test_of_branches_the_cheapest_counts_and_there_is_room_for_all(choice: str) -> None:
    read = hlo.read(BRANCHES.replace("CHOICE", choice))
    assert costs.count_flops(read) == 0
    assert costs.find_collectives(read, ON_2_BY_2) == []
    array = 1024 * 1024 * 4
    assert costs.count_bytes(read) == (2 + 2) * array  # read and written by each function
    assert {"sin", "dot"} <= {each.what for each in costs.find_buffers(read, 9)}


def test_collectives_are_named_by_the_axis_and_the_network(module: hlo.Module) -> None:
    collectives = costs.find_collectives(module, ON_2_BY_2)
    gather, reduce = collectives
    assert (gather.kind, gather.axes, gather.between_slices, gather.count) == (
        "all-gather",
        "fsdp",
        False,
        5,
    )
    assert (gather.bytes, gather.wire_bytes) == (5 * 2**21, 5 * 2**20)
    assert (reduce.kind, reduce.axes, reduce.between_slices) == ("all-reduce", "data", True)
    assert reduce.wire_bytes == reduce.bytes == 8 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("transfer", "kind", "parts", "sent"),
    [
        ("ALL_REDUCE", "all-reduce", 1, 1.5),
        ("ALL_GATHER", "all-gather", 4, 3),  # the result is four parts; three are sent
        ("REDUCE_SCATTER", "reduce-scatter", 1, 0.75),
        ("ALL_TO_ALL", "all-to-all", 1, 0.75),
        ("ONE_TO_ONE", "collective-permute", 1, 1),
    ],
)
def test_what_four_slices_send_each_other_is_counted_by_its_kind(
    transfer: str, kind: str, parts: int, sent: float
) -> None:
    text = (TEXTS / "loop.hlo").read_text()
    read = hlo.read(text.replace('"ALL_REDUCE"', f'"{transfer}"'))
    layout = DeviceLayout(ON_2_BY_2.axes, ON_2_BY_2.members, ON_2_BY_2.slices, "data", 4)
    collectives = costs.find_collectives(read, layout)
    between = next(each for each in collectives if each.between_slices)
    operand = 8 * 128 * 128 * 2
    assert (between.kind, between.axes, between.bytes) == (kind, "data", parts * operand)
    assert between.wire_bytes == sent * operand


def test_the_largest_arrays_have_the_users_line_not_the_librarys(module: hlo.Module) -> None:
    largest, *others = costs.find_buffers(module, 10)
    assert (largest.array, largest.what) == ("bf16[6,512,1024]", "argument params['w']")
    assert [each.source for each in others if each.array == "bf16[256,1024]"] == []
    array = next(each for each in module.computations["body"].values() if each.name == "made")
    assert module.find_source(array) == "/home/me/train.py:12 (step)"


@pytest.mark.parametrize(
    ("array", "padded"),
    [
        (Array("bf16", (8, 128), "1,0:T(8,128)(2,1)"), 8 * 128 * 2),
        (Array("bf16", (1000, 100), "1,0:T(8,128)(2,1)"), 1000 * 128 * 2),
        (Array("f32", (100, 1000), "0,1:T(8,128)"), 1000 * 128 * 4),
        (Array("f32", (3, 5, 7), "2,1,0:T(8,128)"), 3 * 8 * 128 * 4),
        (Array("s32", (), ":T(128)"), 128 * 4),
        (Array("f32", (3, 5)), 3 * 5 * 4),
        (Array("s4", (8, 128)), 8 * 128 // 2),
        (Array("pred", (8,)), 8),
    ],
)
def test_tiles_pad_the_axes_that_lie_together(array: Array, padded: int) -> None:
    assert array.padded_bytes == padded


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,2},{1,3}}, x=1", (0, 2)),
        ("replica_groups=[2,2]<=[4], x=1", (0, 1)),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x=1", (0, 2)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2), x=1", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x=1", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, x=1", (0, 1)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, x=1", (0, 2)),
        ("source_target_pairs={{1,3},{3,1}}, x=1", (1, 3)),
        ("replica_groups={}, x=1", (0, 1, 2, 3)),
        ("replica_groups=something new", ()),
    ],
)
def test_groups_are_read_in_every_way_that_they_are_written(
    written: str, group: tuple[int, ...]
) -> None:
    assert ON_2_BY_2.read_group(written) == group


def test_axes_between_slices_are_those_along_which_the_slice_changes() -> None:
    axes = (("data", 2), ("fsdp", 4))
    assert name_axes_between(axes, [0, 0, 0, 0, 1, 1, 1, 1]) == "data"
    assert name_axes_between(axes, [0] * 8) == ""
    assert name_axes_between((("fsdp", 8),), [0, 0, 0, 0, 1, 1, 1, 1]) == "fsdp"


def test_a_batch_of_matrices_is_a_window_with_gaps() -> None:
    read = hlo.read((TEXTS / "batch.hlo").read_text())
    assert costs.count_flops(read) == 8 * 2 * 16 * 32 * 64


def test_a_report_reads_back_and_says_what_bounds_a_run() -> None:
    report = CompileReport(
        name="step",
        accelerator="tpu-v6e-16",
        family="v6e",
        verdict=CompileVerdict.FITS,
        devices=16,
        memory=MemoryUse(arguments=1 << 30, outputs=1 << 30, aliased=1 << 30),
        flops=918e9,
        hbm_bytes=1638e5,
    )
    assert "… in the place of arguments  -1.00 GiB" in report.text()
    assert CompileReport.from_json(report.to_json()) == report
    assert (report.bound, report.step_s) == ("matrix units", pytest.approx(1e-3))
    assert report.usd_per_1000_runs is None
    assert "price unknown" in report.text()
    priced = replace(report, usd_per_hour=36.0, price_origin="your price")
    assert priced.usd_per_1000_runs == pytest.approx(0.01)
    assert "$0.01 for 1,000 runs (your price)" in priced.text()
    assert "at least 1.00 ms, bound by matrix units" in report.text()
    assert max(map(len, report.text(40).splitlines())) <= 40
    assert "of Pallas" not in report.text()
    counted = replace(report, kernels=2).text()
    assert "The multiplications of 2 Pallas kernels are not counted" in counted
    idle = replace(report, flops=0.0, hbm_bytes=0.0)
    assert "at least" not in idle.text() + summarize(idle)
    assert report._repr_html_().startswith("<pre>step: FITS on tpu-v6e-16")
    assert report.summary()["bound"] == "matrix units"


@pytest.mark.parametrize(
    ("verdict", "detail"),
    [
        (CompileVerdict.TOO_LARGE, "Ran out of memory"),
        (CompileVerdict.REFUSED, "unknown operation"),
        (CompileVerdict.NOT_COMPILED, "it was ended"),
        (CompileVerdict.FITS, "only memory is known"),
    ],
)
def test_a_document_has_no_time_where_costs_are_not_known(
    verdict: CompileVerdict, detail: str
) -> None:
    report = CompileReport(
        name="step",
        accelerator="tpu-v6e-16",
        family="v6e",
        verdict=verdict,
        detail=detail,
        usd_per_hour=36.0,
    )
    document = report.summary()
    assert [document[name] for name in ("step_s", "bound", "usd_per_1000_runs")] == [None] * 3
    assert "at least" not in report.text() + summarize(report)
