"""What the compiler of the real chip says of a program: frozen values.

In: figures. Out: `CompileReport`, as a value, as JSON, as text and for notebooks.
"""

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
"""Arrays are named for their padding when it is more than this part of them."""
_ROWS = 6
_LINES = 8
"""Of what the compiler says."""


class CompileVerdict(StrEnum):
    """What became of the program."""

    FITS = "fits"
    TOO_LARGE = "too large"
    REFUSED = "does not compile"
    NOT_COMPILED = "not compiled"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.

    Attributes:
        arguments: what the program is given.
        outputs: what it returns.
        aliased: the part of its outputs that takes the place of arguments (donated).
        temporaries: what it needs while it runs.
        code: the program itself.
        host: arrays that it keeps in the host's memory, beside all of these.
        needed: all of it together, as the compiler says it where the program is too large; 0 if
            it does not.
        available: what the compiler may use, as it says it where the program is too large; else
            what the chip has.
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
        """All of it together."""
        parts = self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        return max(self.needed, parts)


@dataclass(frozen=True)
class Buffer:
    """An array in a device's memory.

    Attributes:
        array: its type and shape on one device.
        bytes: what it takes.
        data_bytes: ... without what pads it to the tiles of the chip.
        what: an argument's name, or the operation.
        source: the line that made it; "" if it is not known.
    """

    array: str
    bytes: int
    data_bytes: int
    what: str
    source: str = ""


@dataclass(frozen=True)
class Collective:
    """What devices send each other each time the program runs.

    Attributes:
        kind: "all-gather", ...
        axes: the axes of the mesh along which it goes.
        between_slices: whether over the data center's network (DCN), not within a slice (ICI).
        count: how many there are, those in loops as often as they run.
        bytes: of the arrays, together.
        wire_bytes: what each device must send at least.
    """

    kind: str
    axes: str
    between_slices: bool
    count: int
    bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class CompileReport(Record, called="The report of the compiler"):
    """What the compiler of the real chip says of a program.

    Attributes:
        name: the program: of its function.
        source: where the function is; "" if it is not known.
        accelerator: the slice that it was compiled for.
        slices: how many of them.
        devices: that the program uses.
        verdict: whether it fits.
        detail: what the compiler said, if it does not.
        memory: of each device.
        buffers: the largest arrays, largest first.
        collectives: what devices send each other, most bytes first.
        flops: operations of matrix units in each run, on each device.
        hbm_bytes: of memory that are read and written at least in each run, on each device.
        took_s: how long the compiler took.
        versions: of jaxlib and libtpu.
        usd_per_hour: what all slices together cost; None where that is not known.
        price_origin: where this price is from.
        kernels: kernels of Pallas among it, whose multiplications are not in `flops`.
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
        """Whether the compiler made a program that the chip can hold."""
        return self.verdict is CompileVerdict.FITS

    @property
    def chip(self) -> ChipFacts:
        """What the chip has."""
        return CHIPS[self.family]

    @property
    def times_s(self) -> dict[str, float]:
        """The least time that each part of the chip needs for a run, by its name."""
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
        """A lower bound of the time of a run: as if all parts of the chip were busy at once, at
        their peaks; that of matrix units is for bfloat16, and int8 may be faster."""
        return max(self.times_s.values())

    @property
    def bound(self) -> str:
        """The part of the chip that sets this bound."""
        times = self.times_s
        return max(times, key=lambda part: times[part])

    @property
    def usd_per_1000_runs(self) -> float | None:
        """Of the slices as wholes, at the lower bound; None where the price is not known."""
        return None if self.usd_per_hour is None else self.step_s / 3.6 * self.usd_per_hour

    @property
    def hbm_bytes_there(self) -> int:
        """What a device has, or lets a program use."""
        return self.memory.available or self.chip.hbm_bytes // self.chip.devices

    def text(self, width: int | None = None) -> str:
        """Return it for people; lines of at most `width` letters, uncut without one."""
        return draw(self, width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.text())}</pre>"

    def summary(self) -> dict[str, Any]:
        """Return a JSON object with what follows from the figures beside them: null where they are
        not known."""
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
    """Return the report of a program that was not compiled, and why."""
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


def gib(size_bytes: float) -> str:
    """Return a size as chips' memory is measured: "31.25 GiB", "0.80 MiB", "1.50 KiB"."""
    for unit, whole in (("GiB", GIB), ("MiB", 1 << 20)):
        if abs(size_bytes) >= whole / 10:
            return f"{size_bytes / whole:.2f} {unit}"
    return f"{size_bytes / (1 << 10):.2f} KiB"


def draw(report: CompileReport, width: int | None) -> str:
    """Return the report as text."""
    lines = [_first_line(report), *_explain(report)]
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
        return f"{report.name}: {report.verdict}: {first_sentence(report.detail)}"
    used, available = report.memory.total, report.hbm_bytes_there
    fits = f"{report.name}: fits, {gib(used)} of {gib(available)} per device"
    if not _has_costs(report) or not report.step_s:
        return fits
    return f"{fits}; at least {_time(report.step_s)} a run, bound by {report.bound}"


def _has_costs(report: CompileReport) -> bool:
    """Whether it is known what a run costs: the compiler has left its program."""
    return report.fits and not report.detail


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
    """What the compiler said; of a long text the first paragraph: what it lists below is shown as
    figures, and what it dumps of itself helps nobody."""
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
    yield f"Memory of each device: {gib(memory.total)} of {gib(available)} ({share})"
    rows = [
        ("arguments", memory.arguments),
        ("outputs", memory.outputs),
        ("… in the place of arguments", -memory.aliased),
        ("temporaries", memory.temporaries),
        ("code", memory.code),
    ]
    if any(size for _, size in rows):
        yield from _align([(f"  {name}", gib(size)) for name, size in rows if size])
    if memory.host:
        yield f"In the host's memory: {gib(memory.host)}; the times do not count the way there"


def _draw_arrays(report: CompileReport) -> Iterator[str]:
    if report.buffers:
        yield from ("", "Largest arrays:")
        yield from _align(
            [
                (f"  {gib(buffer.bytes)}", buffer.array, buffer.what, buffer.source)
                for buffer in report.buffers[:_ROWS]
            ]
        )
    padded = [e for e in report.buffers if e.bytes - e.data_bytes > _PADDING_WORTH * e.bytes]
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
                f"  {gib(collective.wire_bytes)}",
                f"{collective.count} x {collective.kind}",
                f"over {collective.axes}" if collective.axes else "",
                "DCN, between slices" if collective.between_slices else "ICI",
            )
            for collective in report.collectives
        ]
    )


def _draw_time(report: CompileReport) -> Iterator[str]:
    if not report.step_s:  # it takes no part of the chip any time
        return
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
    if report.kernels:
        many = "1 kernel of Pallas multiplies"
        if report.kernels > 1:
            many = f"{report.kernels} kernels of Pallas multiply"
        yield f"  What {many} is not counted, only what is read and written"
    cost = report.usd_per_1000_runs
    if cost is None:
        yield "  price not known"
    else:
        yield f"  {in_usd(cost)} for 1,000 runs ({report.price_origin})"


def _time(seconds: float) -> str:
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
