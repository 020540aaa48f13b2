"""The compiler's report as text.

In: `CompileReport`, the width of the terminal. Out: lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kinetic._compile.report import CompileReport, CompileVerdict, gib

_PADDING_WORTH = 0.1
"""Arrays are named for their padding when it is more than this part of them."""
_ROWS = 6


def draw(report: CompileReport, width: int | None) -> str:
    """Return the report as text."""
    lines = [_first_line(report), *_explain(report)]
    if report.memory.total:
        lines += ["", *_draw_memory(report)]
    if report.verdict is CompileVerdict.FITS and not report.detail:
        lines += _draw_arrays(report)
        lines += _draw_collectives(report)
        lines += _draw_time(report)
    return "\n".join(line if width is None else _cut(line, width) for line in lines)


def summarize(report: CompileReport) -> str:
    """Return the report in one line."""
    if report.verdict is not CompileVerdict.FITS:
        return f"{report.name}: {report.verdict}: {first_sentence(report.detail)}"
    used, there = report.memory.total, report.hbm_bytes_there
    fits = f"{report.name}: fits, {gib(used)} of {gib(there)} per device"
    if report.detail:
        return fits
    return f"{fits}; at least {_time(report.step_s)} a run, bound by {report.bound}"


def first_sentence(text: str) -> str:
    """Return the first line of what somebody said."""
    return text.strip().split("\n", 1)[0]


def _first_line(report: CompileReport) -> str:
    many = f"{report.slices} slices of " if report.slices > 1 else ""
    at = f" ({report.source})" if report.source else ""
    return (
        f"{report.name}{at}: {report.verdict.upper()} on {many}{report.accelerator}, "
        f"{report.devices} device{'s' if report.devices > 1 else ''}"
    )


def _explain(report: CompileReport) -> Iterator[str]:
    if report.detail:
        yield from (f"  {line}" for line in report.detail.strip().splitlines())


def _draw_memory(report: CompileReport) -> Iterator[str]:
    memory, there = report.memory, report.hbm_bytes_there
    yield f"Memory of each device: {gib(memory.total)} of {gib(there)} ({memory.total / there:.0%})"
    rows = [
        ("arguments", memory.arguments),
        ("outputs", memory.outputs),
        ("… in the place of arguments", -memory.aliased),
        ("temporaries", memory.temporaries),
        ("code", memory.code),
    ]
    if any(size for _, size in rows):
        yield from _align([(f"  {name}", gib(size)) for name, size in rows if size])


def _draw_arrays(report: CompileReport) -> Iterator[str]:
    if report.buffers:
        yield from ("", "Largest arrays:")
        yield from _align(
            [
                (f"  {gib(each.bytes)}", each.array, each.what, each.source)
                for each in report.buffers[:_ROWS]
            ]
        )
    padded = [e for e in report.buffers if e.bytes - e.data_bytes > _PADDING_WORTH * e.bytes]
    for each in padded[:_ROWS]:
        share = 1 - each.data_bytes / each.bytes
        yield f"  {share:.0%} of {each.array} ({each.what}) is padding to the chip's tiles"
    for one in report.replicas[:_ROWS]:
        yield (
            f"  {one.name} {one.array} is whole along {one.axis}, which could split it: "
            f"{gib(one.saved_bytes)} less on each device"
        )


def _draw_collectives(report: CompileReport) -> Iterator[str]:
    if not report.collectives:
        return
    yield from ("", "Sent by each device in a run:")
    yield from _align(
        [
            (
                f"  {gib(each.wire_bytes)}",
                f"{each.count} x {each.kind}",
                f"over {each.axes}" if each.axes else "",
                "DCN, between slices" if each.between_slices else "ICI",
            )
            for each in report.collectives
        ]
    )


def _draw_time(report: CompileReport) -> Iterator[str]:
    yield ""
    yield f"A run takes at least {_time(report.step_s)}, bound by {report.bound}:"
    amounts = {
        "matrix units": f"{report.flops / 1e12:.3f} Tflop",
        "memory": gib(report.hbm_bytes),
    }
    yield from _align(
        [
            (f"  {part}", _time(seconds), amounts.get(part, ""))
            for part, seconds in report.times_s.items()
            if seconds
        ]
    )
    cost = report.usd_per_1000_runs
    yield "  list price not known" if cost is None else f"  {cost:.2f} USD for 1,000 runs"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(width - 1, 1)]}…"
