"""The XLA compiler's messages about programs too large for memory, parsed and shortened."""

from __future__ import annotations

import pytest

from kinetic._compile import hlo, shortage
from kinetic._compile.report import CompileReport, CompileVerdict

GIB = 1 << 30
EARLY = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (123.25G) exceeds available HBM (31.24G). HLO module: jit_step."
)
LATE = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.50G of 15.50G hbm.

Total hbm usage >= 20.00G:
    reserved        512.00M
    program          19.50G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 19.50G:
    global           276.0K
    HLO temp         19.50G (33.1% utilization: Unpadded (6.40G) Padded (19.32G))

  Largest program allocations in hbm:

  1. Size: 14.00G
     Operator: op_type="iota" op_name="jit(step)/one_hot/iota" source_file="/t/a.py" source_line=7
     Shape: s32[29360128,10]{1,0:T(8,128)}
     Unpadded size: 1.50G
     Extra memory due to padding: 12.50G (9.3x expansion)
     XLA label: iota.2 = s32[29360128,10]{1,0:T(8,128)} iota(), iota_dimension=1
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: f32[128,1024,1024]{2,1,0:T(8,128)}
     Unpadded size: 512.00M
     XLA label: fusion.9
     Allocation type: HLO temp
     ==========================
"""


def test_both_texts_say_how_much_is_needed_and_there() -> None:
    early, late = shortage.read_shortage(EARLY), shortage.read_shortage(LATE)
    assert (early.needed, early.available) == (int(123.25 * GIB), int(31.24 * GIB))
    assert (late.needed, late.available) == (int(19.5 * GIB), int(15.5 * GIB))


def test_the_largest_allocations_are_arrays_with_their_lines() -> None:
    assert shortage.read_allocations(EARLY) == ()
    first, second = shortage.read_allocations(LATE)
    assert (first.array, first.what, first.source) == ("s32[29360128,10]", "iota", "/t/a.py:7")
    assert (first.bytes, first.data_bytes) == (14 * GIB, int(1.5 * GIB))
    assert (second.array, second.bytes, second.source) == ("f32[128,1024,1024]", GIB // 2, "")


def make_report(verdict: CompileVerdict, detail: str) -> CompileReport:
    return CompileReport(
        name="step",
        accelerator="tpu-v5e-1",
        family="v5litepod",
        verdict=verdict,
        detail=detail,
        memory=shortage.read_shortage(detail),
        buffers=shortage.read_allocations(detail),
    )


def test_a_long_text_is_shown_as_its_first_paragraph_and_its_arrays() -> None:
    text = make_report(CompileVerdict.TOO_LARGE, LATE).text()
    assert "Used 19.50G of 15.50G hbm." in text
    assert "more lines in the report's `detail`" in text
    assert "XLA label" not in text
    assert "14.00 GiB  s32[29360128,10]    iota  /t/a.py:7" in text
    assert "89% of s32[29360128,10] (iota) is padding to the chip's tiles" in text
    assert "Memory of each device: 19.50 GiB of 15.50 GiB (126%)" in text


def test_short_texts_and_the_last_words_of_a_crash_are_shown_whole() -> None:
    assert EARLY in make_report(CompileVerdict.TOO_LARGE, EARLY).text()
    words = "\n".join(f"line {number}" for number in range(20))
    assert "line 19" in make_report(CompileVerdict.NOT_COMPILED, words).text()
    assert "line 19" not in make_report(CompileVerdict.REFUSED, words).text()


SCOPED = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %doubler.1 = \
f32[8192,4096]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/doubler/pallas_call" stack_frame_id=2}. Scoped allocation with size \
64.00M and limit 32.00M exceeded scoped vmem limit by 32.00M."""
WINDOWS = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space vmem. Used 256.00M of 127.94M vmem. Exceeded vmem capacity by 128.06M.

  Largest program allocations in vmem:

  1. Size: 128.00M
     Operator: op_name="jit(step)/pallas_call"
     Shape: u8[134217728]{0}
     XLA label: fusion.1 = fusion(x.1), custom_call_target="tpu_custom_call"
"""
LOWERED = """HloModule m

FileNames
1 "/t/a.py"

FunctionNames
1 "step"
2 "kernel"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=3 end_line=3 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} custom-call(%x), metadata={op_name="jit(step)/pallas_call" stack_frame_id=1}
}
"""


@pytest.mark.parametrize(
    ("message", "explanation"),
    [
        (SCOPED, "The kernel doubler.1 at /t/a.py:3 (kernel) takes more vector memory (VMEM) "
         "than a core has, 64.00M where 32.00M are allowed"),
        (WINDOWS, "The fusion fusion.1 at /t/a.py:7 (step) takes more vector memory (VMEM) "
         "than a core has, 256.00M where 127.94M are allowed"),
        ("Ran out of memory in memory space smem.", "The program takes more smem than a core has"),
        (EARLY, ""),
        (LATE, ""),
        ("INTERNAL: something else", ""),
    ],
)  # fmt: skip
def test_memory_of_a_core_is_told_from_that_of_the_chip(message: str, explanation: str) -> None:
    assert shortage.explain_core(message, hlo.read(LOWERED)) == explanation
    without_lines = shortage.explain_core(message, hlo.Module("", {}, {}))
    assert without_lines == explanation.replace(" at /t/a.py:3 (kernel)", "").replace(
        " at /t/a.py:7 (step)", ""
    )
