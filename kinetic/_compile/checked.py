"""The programs of a run on a simulated slice, as its leader leaves them; and what the compiler of
the real slice says of all of them.

In: a folder. Out: `Lowered` programs, largest first; `CheckReport`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kinetic._compile import hlo
from kinetic._compile.lowering import Lowered
from kinetic._compile.processes import Compilers
from kinetic._compile.program import LoweredProgram
from kinetic._compile.report import CompileReport, CompileVerdict, describe_refusal, summarize
from kinetic._compile.topologies import CompileTarget
from kinetic._core.documents import Record
from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

SKIPPED = "skipped.json"
_WORTH_ALL = (CompileVerdict.TOO_LARGE, CompileVerdict.REFUSED)
MOST_COMPILED = 24
"""The largest programs of a run: a training has two or three that matter."""


def name_files(number: int) -> tuple[str, str]:
    """Return the names of the description and the module of the n-th program."""
    return f"{number:04d}.json", f"{number:04d}.mlir"


@dataclass(frozen=True)
class Skipped(Record, called="The count of programs"):
    """What was not kept: at least so many programs.

    Attributes:
        tree: where the source lay on the host.
        small: single operations.
        beyond: more than are kept.
    """

    tree: str = ""
    small: int = 0
    beyond: int = 0


@dataclass(frozen=True)
class CheckReport(Record, called="The report of the check"):
    """What the compiler of the real slice says of the programs of a run.

    Attributes:
        accelerator: the slice.
        reports: of programs, largest first.
        small: programs of one operation, which were not looked at, at least.
        left_out: programs beyond the number that is compiled, at least.
    """

    accelerator: str
    reports: tuple[CompileReport, ...] = ()
    small: int = 0
    left_out: int = 0

    @property
    def ok(self) -> bool:
        """Whether all programs that were compiled fit."""
        return all(report.fits for report in self.reports)

    def text(self, width: int | None = None) -> str:
        """Return it for people: the largest program of the caller's own in full, and those that do
        not fit; the others in a line each."""
        own = (n for n, each in enumerate(self.reports) if not hlo.is_of_library(each.source))
        first = next(own, 0)
        texts = [
            report.text(width)
            if number == first or report.verdict in _WORTH_ALL
            else summarize(report)
            for number, report in enumerate(self.reports)
        ]
        verdicts = Counter(str(report.verdict) for report in self.reports)
        counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        count = _count(len(self.reports))
        head = f"{count} compiled for {self.accelerator}: {counts or 'nothing'}"
        return "\n\n".join([head, *texts, *self._name_rest()])

    def _name_rest(self) -> Iterator[str]:
        if self.small:
            were = "was" if self.small == 1 else "were"
            yield f"At least {_count(self.small)} of one operation {were} not looked at."
        if self.left_out:
            yield f"At least {_count(self.left_out)} smaller than these were not compiled."

    def __str__(self) -> str:
        return self.text()


def _count(programs: int) -> str:
    return f"{programs} program{'' if programs == 1 else 's'}"


def read_programs(folder: Path) -> list[Lowered]:
    """Return what was kept in a folder, largest first."""
    programs = []
    for place in sorted(folder.glob("[0-9]*.json")):
        with contextlib.suppress(OSError, CorruptRecord):
            program = LoweredProgram.read(place.read_bytes())
            programs.append(Lowered(program, place.with_suffix(".mlir").read_bytes()))
    return sorted(programs, key=lambda lowered: -lowered.program.weight)


class ProgramCheck:
    """Compiles what a run has left."""

    def __init__(
        self, folder: Path, target: CompileTarget, compilers: Compilers, *, client_root: str = ""
    ) -> None:
        """`client_root`: where the source lies here, for the lines that are shown."""
        self._target = target
        self._compilers = compilers
        self._client_root = client_root
        self._programs = read_programs(folder)
        self._skipped = Skipped()
        with contextlib.suppress(OSError, CorruptRecord):
            self._skipped = Skipped.read((folder / SKIPPED).read_bytes())

    @property
    def count(self) -> int:
        """How many programs will be compiled."""
        return min(len(self._programs), MOST_COMPILED)

    def compile(self) -> Iterator[CompileReport]:
        """Yield the reports as they are ready; afterwards `report` has them all."""
        chosen = self._programs[:MOST_COMPILED]
        self._reports: dict[int, CompileReport] = {}
        for number, lowered in enumerate(chosen):
            if why := self._find_refusal(lowered.program):
                program, target = lowered.program, self._target
                refused = describe_refusal(
                    program.name, program.source, target.topology, target.slices, detail=f"{why}."
                )
                yield self._note(number, refused)
        open_ = [number for number in range(len(chosen)) if number not in self._reports]
        for at, report in self._compilers.compile([chosen[number] for number in open_]):
            yield self._note(open_[at], report)

    def _note(self, number: int, report: CompileReport) -> CompileReport:
        """Keep a report, with the caller's own files in it."""
        if self._skipped.tree and self._client_root:
            report = _rename_files(report, self._skipped.tree, self._client_root)
        self._reports[number] = report
        return report

    @property
    def report(self) -> CheckReport:
        """All of it, once it was compiled."""
        left_out = len(self._programs) - self.count + self._skipped.beyond
        reports = tuple(report for _, report in sorted(self._reports.items()))
        return CheckReport(
            self._target.topology.name, reports, self._skipped.small, max(left_out, 0)
        )

    def _find_refusal(self, program: LoweredProgram) -> str:
        real = self._target.devices_per_slice * self._target.slices
        if not program.refused and max(program.positions, default=0) >= real:
            return f"it uses {max(program.positions) + 1} devices, and the slices have {real}"
        return program.refused


def _rename_files(report: CompileReport, tree: str, root: str) -> CompileReport:
    def rename(text: str) -> str:
        return text.replace(f"{tree.rstrip('/')}/", f"{root.rstrip('/')}/")

    buffers = tuple(replace(buffer, source=rename(buffer.source)) for buffer in report.buffers)
    return replace(
        report, source=rename(report.source), detail=rename(report.detail), buffers=buffers
    )
