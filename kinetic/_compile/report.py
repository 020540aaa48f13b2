"""What the compiler of the real chip says of a program: frozen values.

In: figures. Out: `CompileReport`, as a value, as JSON, as text and for notebooks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kinetic._core.accelerators.chips import CHIPS, GIB, ChipFacts
from kinetic._core.documents import Record
from kinetic._core.values import dataclass


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
class Replica:
    """An argument that is whole on devices along an axis that could split it.

    Attributes:
        name: of the argument.
        array: its type and shape as a whole.
        axis: of the mesh.
        saved_bytes: what splitting it along this axis would save on each device.
    """

    name: str
    array: str
    axis: str
    saved_bytes: int


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
        replicas: arguments that an axis of the mesh could split and does not, largest first.
        flops: operations of matrix units in each run, on each device.
        hbm_bytes: of memory that are read and written at least in each run, on each device.
        took_s: how long the compiler took.
        versions: of JAX and libtpu.
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
    replicas: tuple[Replica, ...] = ()
    flops: float = 0.0
    hbm_bytes: float = 0.0
    took_s: float = 0.0
    versions: str = ""

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
        found = {
            "matrix units": self.flops * chip.devices / chip.flops,
            "memory": self.hbm_bytes * chip.devices / chip.hbm_bytes_s,
            "ICI": sent[False] * chip.devices / chip.ici_bytes_s,
        }
        if chip.dcn_bytes_s:
            found["DCN"] = sent[True] * chip.devices / chip.dcn_bytes_s
        return found

    @property
    def step_s(self) -> float:
        """A lower bound of the time of a run: as if all parts of the chip were busy at once, at
        their peaks."""
        return max(self.times_s.values())

    @property
    def bound(self) -> str:
        """The part of the chip that sets this bound."""
        times = self.times_s
        return max(times, key=lambda part: times[part])

    @property
    def usd_per_1000_runs(self) -> float | None:
        """At list price, at the lower bound; None where the price is not known."""
        price = self.chip.usd_per_hour
        chips = self.devices / self.chip.devices
        return None if price is None else self.step_s / 3.6 * price * chips

    @property
    def hbm_bytes_there(self) -> int:
        """What a device has, or lets a program use."""
        return self.memory.available or self.chip.hbm_bytes // self.chip.devices

    def text(self, width: int | None = None) -> str:
        """Return it for people; lines of at most `width` letters, uncut without one."""
        from kinetic._compile import drawing

        return drawing.draw(self, width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.text())}</pre>"

    def summary(self) -> dict[str, Any]:
        """Return a JSON object with what follows from the figures beside them."""
        return self.to_json() | {
            "total_bytes": self.memory.total,
            "hbm_bytes_there": self.hbm_bytes_there,
            "step_s": self.step_s,
            "bound": self.bound,
            "usd_per_1000_runs": self.usd_per_1000_runs,
        }


def gib(size_bytes: float) -> str:
    """Return a size as chips' memory is measured: "31.25 GiB", "0.8 MiB"."""
    if size_bytes >= GIB / 10:
        return f"{size_bytes / GIB:.2f} GiB"
    return f"{size_bytes / (1 << 20):.2f} MiB"
