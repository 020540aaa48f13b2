"""Compilers, each a process of its own, as many at once as memory and processors permit.

In: lowered programs, the slices. Out: `CompileReport`s, as they are ready; those of programs that
were compiled before, from the cache.

A compiler that crashes, takes all memory or does not end costs nothing but its own report. So a
fork of the caller would not do: its memory and threads would be in the crash as well, and JAX may
have started a backend there. A new interpreter costs two seconds beside a compile of ten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kinetic._compile import compiler, topologies
from kinetic._compile.lowering import Lowered
from kinetic._compile.origins import rename_origins
from kinetic._compile.program import LoweredProgram
from kinetic._compile.report import CompileReport, CompileVerdict, describe_refusal
from kinetic._compile.topologies import CompileTarget
from kinetic._core.accelerators.prices import Price
from kinetic._core.documents import Record
from kinetic._core.values import dataclass
from kinetic._store import files
from kinetic._system import locks, machine
from kinetic._system.processes import signal_name
from kinetic.errors import CorruptRecord, StoreError
from kinetic.version import __version__

TIMEOUT_S = 600.0
"""Longer than the compiler takes for any step that we know."""
_BYTES_EACH = 3 << 30
"""What a compiler of a large program was seen to take."""
_RULES = 2
"""Another number makes reports that were kept count no more."""
_LAST_WORDS = 1500
_NOISE = re.compile(r"I\d{4} |PC: @|\s+@ +0x|https://symbolize|[0-9a-f,]{80}")
_FOLDER = "kinetic-compile-"
_YOUNG_S = 60.0
_SECOND = 1.0
_START = (
    "import sys; sys.path.insert(0, {!r}); import kinetic; del sys.path[0]; "
    "from kinetic._compile import compiler; compiler.main()"
)
"""With this kinetic, which may be on the path of this process alone."""


class Compiling(NamedTuple):
    """What is waited for.

    Attributes:
        names: of the programs that are compiled now.
        left: how many wait for their turn.
        elapsed_s: since the first of these was begun.
    """

    names: tuple[str, ...]
    left: int
    elapsed_s: float


Watch = Callable[[Compiling | None], None]
"""Is called every second with what is waited for, and with None before anything else is said."""


class _Running(NamedTuple):
    """A compiler at work on one of the programs. Its pipe `ends` when it has; while its folder is
    locked, somebody waits for it."""

    number: int
    name: str
    begun: float
    process: subprocess.Popen[bytes]
    ends: int
    folder: Path
    lock: int
    until: float


@dataclass(frozen=True)
class _CacheEntry(Record, called="The kept report"):
    """A report, and the lines that its program was from."""

    report: CompileReport
    origins: tuple[str, ...] = ()


class Compilers:
    """Compiles programs for one target."""

    def __init__(
        self,
        target: CompileTarget,
        cache: Path | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        at_once: int | None = None,
        watch: Watch | None = None,
        price: Price | None = None,
        flags: Mapping[str, str] | None = None,
    ) -> None:
        """`cache`: the folder that keeps reports; None: none is kept. `price`: of one slice.
        `flags`: the variables of this environment that compilers heed; what was compiled with
        others is not looked at."""
        self._target = target
        self._cache = cache
        self._timeout_s = timeout_s
        self._at_once = at_once or count_at_once()
        self._watch = watch or (lambda _: None)
        self._price = price
        self._flags = dict(flags or {})

    def compile(self, programs: Sequence[Lowered]) -> Iterator[tuple[int, CompileReport]]:
        """Yield the index of each program and its report, as they are ready. To leave the loop, or
        to interrupt it, ends the compilers that run."""
        waiting, running = list[int](), list[_Running]()
        for index, lowered in enumerate(programs):
            if (report_before := self._read_cache(lowered.program)) is not None:
                yield index, self._add_price(report_before)
            else:
                waiting.append(index)
        waiting.reverse()
        if waiting:
            _remove_abandoned(Path(tempfile.gettempdir()))
        try:
            # An interrupt reaches the main thread alone, and none is lost that was being started.
            with ThreadPoolExecutor(1) as starter:
                starter.submit(int).result()  # The executor waits for threads that have begun.
                while waiting or running:
                    while waiting and len(running) < self._at_once:
                        index = waiting.pop()
                        try:
                            starter.submit(self._start, index, programs[index], running).result()
                        except (OSError, StoreError) as error:  # a full disk, say
                            why = f"The compiler could not be started: {error}"
                            yield index, self._report_end(programs[index].program, why)
                    for ended in self._wait(running, len(waiting)) if running else ():
                        running.remove(ended)
                        self._watch(None)
                        report = self._collect(ended, programs[ended.number].program)
                        yield ended.number, self._add_price(report)
        finally:
            self._watch(None)
            for compiler_run in running:
                _end(compiler_run)

    def _start(self, index: int, lowered: Lowered, running: list[_Running]) -> None:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            held = os.open(folder, os.O_RDONLY)
            undo.callback(os.close, held)
            locks.hold(held)
            running.append(self._start_in(folder, held, index, lowered))
            undo.pop_all()

    def _start_in(self, folder: Path, lock: int, index: int, lowered: Lowered) -> _Running:
        for name, content in (
            (compiler.PROGRAM, json.dumps(lowered.program.to_json()).encode()),
            (compiler.TARGET, json.dumps(self._target.to_json()).encode()),
            (compiler.MODULE, lowered.module),
        ):
            files.save(folder / name, [content])
        start = _START.format(str(Path(__file__).resolve().parents[2]))
        own = (str(folder), str(os.getpid()), *topologies.find_compiler())
        command = [sys.executable, "-P", "-c", start, *own]
        ends, held = os.pipe()
        try:
            with open(folder / "stderr", "wb") as err:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=err,
                    stderr=err,
                    start_new_session=True,  # Ctrl-C is ours to pass on.
                    pass_fds=(held,),
                )
        except BaseException:
            os.close(ends)
            raise
        finally:
            os.close(held)
        begun = time.monotonic()
        until = begun + self._timeout_s
        return _Running(index, lowered.program.name, begun, process, ends, folder, lock, until)

    def _wait(self, running: Sequence[_Running], waiting: int) -> list[_Running]:
        """Those that have ended, and those whose time is up."""
        poll = select.poll()  # select() takes no descriptor beyond 1023
        for compiler_run in running:
            poll.register(compiler_run.ends)
        names = tuple(compiler_run.name for compiler_run in running)
        ended: list[_Running] = []
        while not ended:
            now = time.monotonic()
            self._watch(
                Compiling(names, waiting, now - min(compiler_run.begun for compiler_run in running))
            )
            patience_s = min(
                _SECOND, max(0.0, min(compiler_run.until for compiler_run in running) - now)
            )
            ready = {descriptor for descriptor, _ in poll.poll(patience_s * 1000)}
            now = time.monotonic()
            ended = [
                compiler_run
                for compiler_run in running
                if compiler_run.ends in ready or compiler_run.until <= now
            ]
        return ended

    def _collect(self, ended: _Running, program: LoweredProgram) -> CompileReport:
        is_late = ended.until <= time.monotonic() and ended.process.poll() is None
        words = ended.folder / "stderr"
        try:
            report = CompileReport.read((ended.folder / compiler.REPORT).read_bytes())
        except (OSError, CorruptRecord):
            _kill(ended.process)
            code = ended.process.returncode
            last_words = _read_words(words)
            reason = _name_end(code, f"{self._timeout_s:g} s" if is_late else "")
            return self._report_end(program, reason, last_words)
        finally:
            _end(ended)
        self._write_cache(program, report)
        return report

    def _report_end(
        self, program: LoweredProgram, reason: str, last_words: str = ""
    ) -> CompileReport:
        detail = f"{reason} Its last words:\n{last_words}" if last_words else reason
        target, devices = self._target, len(program.positions)
        return describe_refusal(
            program.name,
            program.source,
            target.topology,
            target.slices,
            detail=detail,
            devices=devices,
        )

    def _add_price(self, report: CompileReport) -> CompileReport:
        if self._price is None:
            return report
        whole, origin = self._price.usd_per_hour * self._target.slices, self._price.origin
        return replace(report, usd_per_hour=whole, price_origin=origin)

    # -- what was compiled before ------------------------------------------------------------------

    def _place(self, program: LoweredProgram) -> Path | None:
        if self._cache is None:
            return None
        fixed = replace(program, source="", origins=())
        compiled_by = str(topologies.find_compiler())
        target = self._target.to_json()
        about = [_RULES, fixed.to_json(), target, __version__, compiled_by, self._flags]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
        return self._cache / f"{digest.hexdigest()[:40]}.json"

    def _read_cache(self, program: LoweredProgram) -> CompileReport | None:
        place = self._place(program)
        with contextlib.suppress(OSError, CorruptRecord):
            entry = None if place is None else _CacheEntry.read(files.content(place))
            if entry is not None:
                report = rename_origins(entry.report, entry.origins, program.origins)
                return replace(report, source=program.source)
        return None

    def _write_cache(self, program: LoweredProgram, report: CompileReport) -> None:
        """Keep what would be the same next time: not what is missing because a disk was full. Where
        it cannot be kept, it is compiled again."""
        place = self._place(program)
        is_whole = report.verdict is CompileVerdict.TOO_LARGE or (report.fits and not report.detail)
        if place is None or not is_whole:
            return
        text = json.dumps(_CacheEntry(report, program.origins).to_json()).encode()
        with contextlib.suppress(OSError, StoreError):
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.save(place, [text])


def count_at_once() -> int:
    """Return how many compilers this machine has room for."""
    available = machine.available_memory_bytes()
    by_memory = machine.usable_cpus() if available is None else available // _BYTES_EACH
    return max(1, min(machine.usable_cpus(), by_memory))


def _read_words(place: Path) -> str:
    """The end of what a compiler said, without stacks, which have no names, and news."""
    lines = place.read_text(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if not _NOISE.match(line))[-_LAST_WORDS:].strip()


def _name_end(code: int, limit: str) -> str:
    if limit:
        return f"The compiler did not finish within {limit}, and was ended: nothing is known."
    if code == -signal.SIGKILL:
        return "The compiler was killed (SIGKILL), most likely because memory ran out."
    if code < 0:
        return f"The compiler crashed ({signal_name(-code)})."
    return f"The compiler's process exited with code {code} and left no report."


def _end(running: _Running) -> None:
    _kill(running.process)
    os.close(running.ends)
    shutil.rmtree(running.folder, ignore_errors=True)
    os.close(running.lock)


def _remove_abandoned(temporary: Path) -> None:
    """Remove the folders of compilers whose callers were killed."""
    for folder in temporary.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(held)
                is_old = time.time() - about.st_mtime > _YOUNG_S  # a new one is not locked yet
                if is_old and about.st_uid == os.getuid() and locks.try_hold(held):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
