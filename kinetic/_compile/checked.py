"""Compile check: compile the programs of a run on a simulated slice for the real slice.

The run's leader has saved its lowered programs in a folder.
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
"""Number of programs to compile, largest first: a training run has two or three that matter."""


def name_files(number: int) -> tuple[str, str]:
    """Return the names of the description and the module of the n-th program."""
    return f"{number:04d}.json", f"{number:04d}.mlir"


@dataclass(frozen=True)
class Skipped(Record, called="The count of programs"):
    """Numbers of programs that a run has not saved; the real numbers may be larger.

    Attributes:
        tree: Folder of the source on the host.
        small: Number of programs that are a single operation.
        beyond: Number of programs that were not saved because of a limit on the number of programs.
    """

    tree: str = ""
    small: int = 0
    beyond: int = 0


@dataclass(frozen=True)
class CheckReport(Record, called="The report of the check"):
    """The compiler's results for the programs of a run.

    Attributes:
        accelerator: The slice.
        reports: Reports of programs, largest program first.
        small: Number of programs, at least, not checked because they are a single operation.
        left_out: Number of programs, at least, left out because of the limit.
    """

    accelerator: str
    reports: tuple[CompileReport, ...] = ()
    small: int = 0
    left_out: int = 0

    @property
    def ok(self) -> bool:
        """True if all compiled programs fit."""
        return all(report.fits for report in self.reports)

    def text(self, width: int | None = None) -> str:
        """Return the check as text: full reports of the largest program and of those that do not
        fit, and one line for each other program."""
        own = (n for n, report in enumerate(self.reports) if not hlo.is_library(report.source))
        first = next(own, 0)
        texts = [
            report.text(width)
            if number == first or report.verdict in _WORTH_ALL
            else summarize(report)
            for number, report in enumerate(self.reports)
        ]
        verdicts = Counter(str(report.verdict) for report in self.reports)
        counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        count = _format_count(len(self.reports))
        head = f"{count} compiled for {self.accelerator}: {counts or 'nothing'}"
        return "\n\n".join([head, *texts, *self._name_rest()])

    def _name_rest(self) -> Iterator[str]:
        if self.small:
            were = "was" if self.small == 1 else "were"
            yield f"At least {_format_count(self.small)} of a single operation {were} not checked."
        if self.left_out:
            yield f"At least {_format_count(self.left_out)} smaller than these were not compiled."

    def __str__(self) -> str:
        return self.text()


def _format_count(programs: int) -> str:
    return f"{programs} program{'' if programs == 1 else 's'}"


def read_programs(folder: Path) -> list[Lowered]:
    """Return the saved programs in a folder, largest first."""
    programs = []
    for path in sorted(folder.glob("[0-9]*.json")):
        with contextlib.suppress(OSError, CorruptRecord):
            program = LoweredProgram.read(path.read_bytes())
            programs.append(Lowered(program, path.with_suffix(".mlir").read_bytes()))
    return sorted(programs, key=lambda lowered: -lowered.program.weight)


class ProgramCheck:
    """Compiles the programs that a run has saved."""

    def __init__(
        self, folder: Path, target: CompileTarget, compilers: Compilers, *, client_root: str = ""
    ) -> None:
        """Set up the check. `client_root`: the source's folder on this machine, to name its
        lines."""
        self._target = target
        self._compilers = compilers
        self._client_root = client_root
        self._programs = read_programs(folder)
        self._skipped = Skipped()
        with contextlib.suppress(OSError, CorruptRecord):
            self._skipped = Skipped.read((folder / SKIPPED).read_bytes())

    @property
    def count(self) -> int:
        """Number of programs to compile."""
        return min(len(self._programs), MOST_COMPILED)

    def compile(self) -> Iterator[CompileReport]:
        """Yield each report as soon as it is ready. Afterwards `report` has all reports."""
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
        """Store a report. Paths of the source on the host are replaced by those on this machine."""
        if self._skipped.tree and self._client_root:
            report = _rename_files(report, self._skipped.tree, self._client_root)
        self._reports[number] = report
        return report

    @property
    def report(self) -> CheckReport:
        """All reports, once `compile` has ended."""
        left_out = len(self._programs) - self.count + self._skipped.beyond
        reports = tuple(report for _, report in sorted(self._reports.items()))
        return CheckReport(
            self._target.topology.name, reports, self._skipped.small, max(left_out, 0)
        )

    def _find_refusal(self, program: LoweredProgram) -> str:
        real = self._target.devices_per_slice * self._target.slices
        if not program.refused and max(program.positions, default=0) >= real:
            return f"it uses {max(program.positions) + 1} devices, but the slices have {real}"
        return program.refused


def _rename_files(report: CompileReport, tree: str, root: str) -> CompileReport:
    def rename(text: str) -> str:
        return text.replace(f"{tree.rstrip('/')}/", f"{root.rstrip('/')}/")

    buffers = tuple(replace(buffer, source=rename(buffer.source)) for buffer in report.buffers)
    return replace(
        report, source=rename(report.source), detail=rename(report.detail), buffers=buffers
    )
