"""Compiler processes, as many at once as memory and processors allow, and a cache of their reports.

If a compiler crashes, hangs or takes all memory, only its report is lost. Each compiler is a new
interpreter, which adds two seconds to a compile of about ten. A fork of the caller would have the
caller's memory, and perhaps a running JAX backend.
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
"""Time limit for compiling one program, in seconds: more than any known program needs."""
_BYTES_EACH = 3 << 30
"""Memory in bytes that the compiler of a large program takes, as measured."""
_ANALYSIS_VERSION = 2
"""Version of the analysis of compiled programs. Increase it to invalidate all cached reports."""
_LAST_WORDS = 1500
_NOISE = re.compile(r"I\d{4} |PC: @|\s+@ +0x|https://symbolize|[0-9a-f,]{80}")
_FOLDER = "kinetic-compile-"
_YOUNG_S = 60.0
_SECOND = 1.0
_START = (
    "import sys; sys.path.insert(0, {!r}); import kinetic; del sys.path[0]; "
    "from kinetic._compile import compiler; compiler.main()"
)
"""The program of a compiler process. It imports kinetic by the path of this process."""


class Compiling(NamedTuple):
    """The present activity of the compilers.

    Attributes:
        names: Names of the programs that are being compiled.
        remaining: Number of programs that wait for their turn.
        elapsed_s: Seconds since the first of the running compilers started.
    """

    names: tuple[str, ...]
    remaining: int
    elapsed_s: float


Watch = Callable[[Compiling | None], None]
"""Shows the progress: called every second, and with None before other text is printed."""


class _Running(NamedTuple):
    """A running compiler.

    The pipe `ends` closes when the process exits. The folder is locked while the caller lives.
    """

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
    """A report, and the source lines of its program when it was compiled."""

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
        """Set up compilers; they start in `compile`.

        Args:
            target: The slices.
            cache: Folder of cached reports; None for no cache.
            timeout_s: Limit of one compile, in seconds.
            at_once: Number of processes; by default as many as the machine has room for.
            watch: Shows the progress.
            price: Price of one slice.
            flags: Environment variables that affect compilers; part of the cache key.
        """
        self._target = target
        self._cache = cache
        self._timeout_s = timeout_s
        self._at_once = at_once or count_at_once()
        self._watch = watch or (lambda _: None)
        self._price = price
        self._flags = dict(flags or {})

    def compile(self, programs: Sequence[Lowered]) -> Iterator[tuple[int, CompileReport]]:
        """Yield each program's index and report as soon as the report is ready. If the loop is left
        or interrupted, the running compilers are ended."""
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
            # Start processes in a thread: an interrupt stops only the main thread, so it never
            # loses a process that is just being started.
            with ThreadPoolExecutor(1) as starter:
                starter.submit(int).result()  # Start the thread now: `with` waits for it.
                while waiting or running:
                    while waiting and len(running) < self._at_once:
                        index = waiting.pop()
                        try:
                            starter.submit(self._start, index, programs[index], running).result()
                        except (OSError, StoreError) as error:  # Such as a full disk.
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
                _stop(compiler_run)

    def _start(self, index: int, lowered: Lowered, running: list[_Running]) -> None:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = os.open(folder, os.O_RDONLY)
            undo.callback(os.close, lock)
            locks.hold(lock)
            running.append(self._start_in(folder, lock, index, lowered))
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
        ends, write_end = os.pipe()
        try:
            with open(folder / "stderr", "wb") as err:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=err,
                    stderr=err,
                    start_new_session=True,  # Ctrl-C goes to this process only.
                    pass_fds=(write_end,),
                )
        except BaseException:
            os.close(ends)
            raise
        finally:
            os.close(write_end)
        begun = time.monotonic()
        until = begun + self._timeout_s
        return _Running(index, lowered.program.name, begun, process, ends, folder, lock, until)

    def _wait(self, running: Sequence[_Running], waiting: int) -> list[_Running]:
        """Wait for compilers, and return those that have ended or whose time is up."""
        poll = select.poll()  # select() accepts no descriptor beyond 1023.
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
            last_words = _read_last_words(words)
            reason = _explain_end(code, f"{self._timeout_s:g} s" if is_late else "")
            return self._report_end(program, reason, last_words)
        finally:
            _stop(ended)
        self._write_cache(program, report)
        return report

    def _report_end(
        self, program: LoweredProgram, reason: str, last_words: str = ""
    ) -> CompileReport:
        detail = f"{reason} Its last output:\n{last_words}" if last_words else reason
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

    # -- cache of reports --------------------------------------------------------------------------

    def _locate_entry(self, program: LoweredProgram) -> Path | None:
        if self._cache is None:
            return None
        fixed = replace(program, source="", origins=())
        compiled_by = str(topologies.find_compiler())
        target = self._target.to_json()
        about = [_ANALYSIS_VERSION, fixed.to_json(), target, __version__, compiled_by, self._flags]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
        return self._cache / f"{digest.hexdigest()[:40]}.json"

    def _read_cache(self, program: LoweredProgram) -> CompileReport | None:
        path = self._locate_entry(program)
        with contextlib.suppress(OSError, CorruptRecord):
            entry = None if path is None else _CacheEntry.read(files.content(path))
            if entry is not None:
                report = rename_origins(entry.report, entry.origins, program.origins)
                return replace(report, source=program.source)
        return None

    def _write_cache(self, program: LoweredProgram, report: CompileReport) -> None:
        """Cache a report unless it is incomplete because of a full disk. Errors are ignored."""
        path = self._locate_entry(program)
        is_whole = report.verdict is CompileVerdict.TOO_LARGE or (report.fits and not report.detail)
        if path is None or not is_whole:
            return
        text = json.dumps(_CacheEntry(report, program.origins).to_json()).encode()
        with contextlib.suppress(OSError, StoreError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.save(path, [text])


def count_at_once() -> int:
    """Return the number of compilers that this machine has room for."""
    available = machine.available_memory_bytes()
    by_memory = machine.usable_cpus() if available is None else available // _BYTES_EACH
    return max(1, min(machine.usable_cpus(), by_memory))


def _read_last_words(path: Path) -> str:
    """Return the end of a compiler's output, without log lines and stack traces."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if not _NOISE.match(line))[-_LAST_WORDS:].strip()


def _explain_end(code: int, limit: str) -> str:
    if limit:
        return f"The compiler did not finish within {limit} and was stopped: nothing is known."
    if code == -signal.SIGKILL:
        return "The compiler was killed (SIGKILL), most likely because memory ran out."
    if code < 0:
        return f"The compiler crashed ({signal_name(-code)})."
    return f"The compiler's process exited with code {code} without a report."


def _stop(running: _Running) -> None:
    _kill(running.process)
    os.close(running.ends)
    shutil.rmtree(running.folder, ignore_errors=True)
    os.close(running.lock)


def _remove_abandoned(temporary: Path) -> None:
    """Remove the folders of compilers whose callers were killed."""
    for folder in temporary.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(lock)
                is_old = time.time() - about.st_mtime > _YOUNG_S  # A new folder is not locked yet.
                if is_old and about.st_uid == os.getuid() and locks.try_hold(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
