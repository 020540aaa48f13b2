"""`kinetic.CompileReport`: the compiler's result for a program, as object, JSON, text and HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from kinetic._core.accelerators.chips import CHIPS, GIB, ChipFacts
from kinetic._core.accelerators.prices import in_usd
from kinetic._core.accelerators.topology import Topology
from kinetic._core.documents import Record
from kinetic._core.values import dataclass

_PADDING_WORTH = 0.1
"""The report mentions padding if it takes at least this share of an array's memory."""
_ROWS = 6
_LINES = 8
"""Most lines of the compiler's message to show."""


class CompileVerdict(StrEnum):
    """The compiler's verdict on a program."""

    FITS = "fits"
    TOO_LARGE = "too large"
    REFUSED = "does not compile"
    NOT_COMPILED = "not compiled"


@dataclass(frozen=True)
class MemoryUse:
    """Memory on each device, in bytes.

    Attributes:
        arguments: The program's arguments.
        outputs: The program's results.
        aliased: Part of the outputs that reuses the memory of donated arguments.
        temporaries: Memory that the program needs only while it runs.
        code: The program itself.
        host: Arrays in the host's memory, which are in no other field.
        needed: Total according to the compiler, if the program is too large; 0 if not known.
        available: Memory that the compiler may use, if the program is too large; 0 if not known.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    code: int = 0
    host: int = 0
    needed: int = 0
    available: int = 0

    @property
    def total(self) -> int:
        """Total memory on the device, in bytes."""
        parts = self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        return max(self.needed, parts)


@dataclass(frozen=True)
class Buffer:
    """An array in a device's memory.

    Attributes:
        array: Type and shape on one device.
        bytes: Size with padding to the chip's tiles.
        data_bytes: Size without padding.
        what: Name of the argument or operation from which the array comes.
        source: Source line of the operation; "" if unknown.
    """

    array: str
    bytes: int
    data_bytes: int
    what: str
    source: str = ""


@dataclass(frozen=True)
class Collective:
    """Transfers between devices in one run of a program, of one kind over the same axes.

    Attributes:
        kind: "all-gather", ...
        axes: Axes of the mesh, such as "fsdp, tensor".
        between_slices: True if over the data center's network (DCN), False if within a slice (ICI).
        count: Number of transfers; those in loops count as often as they run.
        bytes: Size of the arrays, together.
        wire_bytes: Lower bound of the bytes that each device sends.
    """

    kind: str
    axes: str
    between_slices: bool
    count: int
    bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class CompileReport(Record, called="The report of the compiler"):
    """The result of compiling a program for a real slice.

    Attributes:
        name: Name of the program's function.
        source: "file:line" of the function; "" if unknown.
        accelerator: Slice that it was compiled for, such as "tpu-v6e-16".
        family: Family of the chips, such as "v6e".
        slices: Number of slices.
        devices: Number of devices that the program uses.
        verdict: `CompileVerdict`: "fits", "too large", "does not compile" or "not compiled".
        detail: The compiler's message; "" if the program fits.
        memory: Memory on each device, in bytes.
        buffers: Largest arrays, largest first.
        collectives: Transfers between devices, most bytes first.
        flops: Operations of matrix units in one run, on each device.
        hbm_bytes: Lower bound of the bytes read and written in one run, on each device.
        took_s: Compile time, in seconds.
        versions: Versions of jaxlib and libtpu.
        usd_per_hour: Price of all slices together; None if unknown.
        price_origin: Origin of this price.
        kernels: Number of Pallas kernels, whose multiplications are not in `flops`.

    Example:
        <!-- not run: the compiler takes many seconds -->
        ```python
        with kinetic.compile_for("tpu-v6e-16") as slice:
            report = slice.compile(step, params, batch)
        if not report.fits:
            print(report)
        ```
    """

    name: str
    accelerator: str
    family: str
    verdict: CompileVerdict
    source: str = ""
    slices: int = 1
    devices: int = 1
    detail: str = ""
    memory: MemoryUse = MemoryUse()
    buffers: tuple[Buffer, ...] = ()
    collectives: tuple[Collective, ...] = ()
    flops: float = 0.0
    hbm_bytes: float = 0.0
    took_s: float = 0.0
    versions: str = ""
    usd_per_hour: float | None = None
    price_origin: str = ""
    kernels: int = 0

    @property
    def fits(self) -> bool:
        """True if the program compiled and fits in the chip's memory."""
        return self.verdict is CompileVerdict.FITS

    @property
    def chip(self) -> ChipFacts:
        """Facts about the chip."""
        return CHIPS[self.family]

    @property
    def times_s(self) -> dict[str, float]:
        """Lower bound of the time, in seconds, that a run needs on each part of the chip, by the
        part's name, such as "memory"."""
        chip = self.chip
        sent = {
            crossing: sum(c.wire_bytes for c in self.collectives if c.between_slices is crossing)
            for crossing in (False, True)
        }
        times = {
            "matrix units": self.flops * chip.devices / chip.flops,
            "memory": self.hbm_bytes * chip.devices / chip.hbm_bytes_s,
            "ICI": sent[False] * chip.devices / chip.ici_bytes_s,
        }
        if chip.dcn_bytes_s:
            times["DCN"] = sent[True] * chip.devices / chip.dcn_bytes_s
        return times

    @property
    def step_s(self) -> float:
        """Lower bound of the time of a run, in seconds: as if all parts of the chip worked at once,
        at their peak rates. For matrix units that is the rate of bfloat16; int8 may be faster."""
        return max(self.times_s.values())

    @property
    def bound(self) -> str:
        """The part of the chip that needs the longest time, such as "memory"."""
        times = self.times_s
        return max(times, key=lambda part: times[part])

    @property
    def usd_per_1000_runs(self) -> float | None:
        """Estimated price of 1,000 runs on all slices in US dollars, from the lower bound of the
        run time; None if unknown."""
        return None if self.usd_per_hour is None else self.step_s / 3.6 * self.usd_per_hour

    @property
    def hbm_bytes_there(self) -> int:
        """Memory of each device that a program may use, in bytes."""
        return self.memory.available or self.chip.hbm_bytes // self.chip.devices

    def text(self, width: int | None = None) -> str:
        """Return the report as text, with lines cut to `width` characters; None cuts no lines."""
        return draw_report(self, width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.text())}</pre>"

    def summary(self) -> dict[str, Any]:
        """Return the report and derived figures as a JSON object, with null for unknown ones."""
        is_known = _has_costs(self)
        return self.to_json() | {
            "total_bytes": self.memory.total,
            "hbm_bytes_there": self.hbm_bytes_there,
            "step_s": self.step_s if is_known else None,
            "bound": self.bound if is_known else None,
            "usd_per_1000_runs": self.usd_per_1000_runs if is_known else None,
        }


def describe_refusal(
    name: str, source: str, topology: Topology, slices: int, *, detail: str, devices: int = 1
) -> CompileReport:
    """Return the report of a program that was not compiled; `detail` is the reason."""
    return CompileReport(
        name=name,
        source=source,
        accelerator=topology.name,
        family=topology.family,
        slices=slices,
        devices=devices,
        verdict=CompileVerdict.NOT_COMPILED,
        detail=detail,
    )


def format_gib(size_bytes: float) -> str:
    """Format a size with binary units: "31.25 GiB", "0.80 MiB", "1.50 KiB"."""
    for unit, whole in (("GiB", GIB), ("MiB", 1 << 20)):
        if abs(size_bytes) >= whole / 10:
            return f"{size_bytes / whole:.2f} {unit}"
    return f"{size_bytes / (1 << 10):.2f} KiB"


def draw_report(report: CompileReport, width: int | None) -> str:
    """Return the report as text."""
    lines = [_draw_title(report), *_draw_detail(report)]
    if report.memory.total:
        lines += ["", *_draw_memory(report)]
    if report.verdict is CompileVerdict.TOO_LARGE:
        lines += _draw_arrays(report)
    if _has_costs(report):
        lines += _draw_arrays(report)
        lines += _draw_collectives(report)
        lines += _draw_time(report)
    return "\n".join(line if width is None else _cut(line, width) for line in lines)


def summarize(report: CompileReport) -> str:
    """Return the report in one line."""
    if report.verdict is not CompileVerdict.FITS:
        return f"{report.name}: {report.verdict}: {take_first_line(report.detail)}"
    used, available = report.memory.total, report.hbm_bytes_there
    fits = f"{report.name}: fits, {format_gib(used)} of {format_gib(available)} per device"
    if not _has_costs(report) or not report.step_s:
        return fits
    return f"{fits}; at least {_format_time(report.step_s)} a run, bound by {report.bound}"


def _has_costs(report: CompileReport) -> bool:
    """True if the report has the costs of a run, which come from a dump of the program."""
    return report.fits and not report.detail


def take_first_line(text: str) -> str:
    """Return the first line of a text."""
    return text.strip().split("\n", 1)[0]


def _draw_title(report: CompileReport) -> str:
    many = f"{report.slices} slices of " if report.slices > 1 else ""
    at = f" ({report.source})" if report.source else ""
    return (
        f"{report.name}{at}: {report.verdict.upper()} on {many}{report.accelerator}, "
        f"{report.devices} device{'s' if report.devices > 1 else ''}"
    )


def _draw_detail(report: CompileReport) -> Iterator[str]:
    """Yield the lines of the compiler's message. Of a long message, yield only the first paragraph:
    the report itself lists the arrays that follow."""
    lines = report.detail.strip().splitlines()
    excerpt = lines
    if report.verdict is not CompileVerdict.NOT_COMPILED and len(lines) > _LINES:
        excerpt = list(itertools.takewhile(str.strip, lines))[:_LINES]
    yield from (f"  {line}" for line in excerpt)
    if len(lines) > len(excerpt):
        yield f"  … {len(lines) - len(excerpt)} more lines in the report's `detail`"


def _draw_memory(report: CompileReport) -> Iterator[str]:
    memory, available = report.memory, report.hbm_bytes_there
    share = f"{memory.total / available:.0%}"
    yield f"Memory of each device: {format_gib(memory.total)} of {format_gib(available)} ({share})"
    rows = [
        ("arguments", memory.arguments),
        ("outputs", memory.outputs),
        ("… in the place of arguments", -memory.aliased),
        ("temporaries", memory.temporaries),
        ("code", memory.code),
    ]
    if any(size for _, size in rows):
        yield from _align([(f"  {name}", format_gib(size)) for name, size in rows if size])
    if memory.host:
        yield f"In the host's memory: {format_gib(memory.host)}; the times do not include transfers"


def _draw_arrays(report: CompileReport) -> Iterator[str]:
    if report.buffers:
        yield from ("", "Largest arrays:")
        yield from _align(
            [
                (f"  {format_gib(buffer.bytes)}", buffer.array, buffer.what, buffer.source)
                for buffer in report.buffers[:_ROWS]
            ]
        )
    padded = [b for b in report.buffers if b.bytes - b.data_bytes > _PADDING_WORTH * b.bytes]
    for buffer in padded[:_ROWS]:
        share = 1 - buffer.data_bytes / buffer.bytes
        yield f"  {share:.0%} of {buffer.array} ({buffer.what}) is padding to the chip's tiles"


def _draw_collectives(report: CompileReport) -> Iterator[str]:
    if not report.collectives:
        return
    yield from ("", "Sent by each device in a run:")
    yield from _align(
        [
            (
                f"  {format_gib(collective.wire_bytes)}",
                f"{collective.count} x {collective.kind}",
                f"over {collective.axes}" if collective.axes else "",
                "DCN, between slices" if collective.between_slices else "ICI",
            )
            for collective in report.collectives
        ]
    )


def _draw_time(report: CompileReport) -> Iterator[str]:
    if not report.step_s:  # The program uses no part of the chip.
        return
    yield ""
    yield f"A run takes at least {_format_time(report.step_s)}, bound by {report.bound}:"
    amounts = {
        "matrix units": f"{report.flops / 1e12:.3f} Tflop",
        "memory": format_gib(report.hbm_bytes),
    }
    yield from _align(
        [
            (f"  {part}", _format_time(seconds), amounts.get(part, ""))
            for part, seconds in report.times_s.items()
            if seconds
        ]
    )
    if report.kernels:
        kernels = "1 Pallas kernel"
        if report.kernels > 1:
            kernels = f"{report.kernels} Pallas kernels"
        yield f"  The multiplications of {kernels} are not counted, only memory traffic"
    cost = report.usd_per_1000_runs
    if cost is None:
        yield "  price unknown"
    else:
        yield f"  {in_usd(cost)} for 1,000 runs ({report.price_origin})"


def _format_time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} µs" if seconds >= 1e-6 else f"{seconds * 1e9:.1f} ns"


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(width - 1, 1)]}…"
