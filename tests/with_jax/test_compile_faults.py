"""Failures of the real compiler, each of which affects one report only; the report cache."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_compile_for import PATIENCE_S, needs_libtpu

import kinetic
from kinetic._compile import lowering, topologies
from kinetic._compile.lowering import Lowered
from kinetic._compile.processes import Compilers, Compiling
from kinetic._compile.program import LoweredProgram
from kinetic._compile.report import CompileReport, CompileVerdict
from kinetic._compile.topologies import CompileTarget
from kinetic._core.accelerators.prices import Price
from kinetic._core.accelerators.resolve import resolve
from kinetic._system import locks, processes
from kinetic.errors import UsageError


@pytest.fixture
def lowered() -> Lowered:
    import jax
    import jax.numpy as jnp

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return lowering.lower(CompileTarget(resolve("tpu-v6e-4")), lambda x: x @ x, (shape,), {})


def compile_all(programs: list[Lowered], **how: Any) -> dict[int, CompileReport]:
    return dict(Compilers(CompileTarget(resolve("tpu-v6e-4")), **how).compile(programs))


@needs_libtpu
def test_what_was_compiled_is_kept_for_the_next_time(lowered: Lowered, tmp_path: Path) -> None:
    progress: list[Compiling | None] = []
    report = compile_all([lowered], cache=tmp_path, watch=progress.append)[0]
    assert report.fits
    assert {each.names for each in progress if each is not None} == {("<lambda>",)}
    assert progress[-1] is None  # The progress line was cleared.
    assert report.usd_per_hour is None
    price = Price(5.0, "your price")
    second = compile_all(
        [Lowered(lowered.program, b"never looked at")], cache=tmp_path, price=price
    )
    assert second == {0: replace(report, usd_per_hour=5.0, price_origin="your price")}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768"),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
    ],
)
def test_what_was_compiled_with_other_flags_is_compiled_again(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    monkeypatch.setenv("KINETIC_CACHE_DIR", str(tmp_path))
    target, counts = kinetic.compile_for("tpu-v6e-4"), []
    for flags in ("", other, ""):
        monkeypatch.setenv(name, flags)
        assert target.compile(lambda x: x @ x, jax.ShapeDtypeStruct((128, 128), "f4")).fits
        counts.append(len(list(tmp_path.rglob("*.json"))))
    assert counts == [1, 2, 2]


@needs_libtpu
def test_a_cache_that_cannot_be_used_costs_no_report(lowered: Lowered, tmp_path: Path) -> None:
    in_the_way, cache = tmp_path / "file", tmp_path / "cache"
    in_the_way.touch()
    assert compile_all([lowered], cache=in_the_way)[0].fits
    report = compile_all([lowered], cache=cache)[0]
    (entry,) = cache.iterdir()
    for damage in (b"{", b"\xff\x00" * 99, None):
        if damage is None:
            entry.unlink()
            os.mkfifo(entry)  # A read of it would block for ever.
        else:
            entry.write_bytes(damage)
        second = compile_all([lowered], cache=cache)[0]
        assert replace(second, took_s=report.took_s) == report
    assert compile_all([Lowered(lowered.program, b"never looked at")], cache=cache)[0].fits


@needs_libtpu
def test_what_may_be_otherwise_next_time_is_not_kept(lowered: Lowered, tmp_path: Path) -> None:
    broken = Lowered(lowered.program, b"no module")
    assert compile_all([broken], cache=tmp_path)[0].verdict is CompileVerdict.REFUSED
    assert compile_all([lowered], cache=tmp_path)[0].fits


@needs_libtpu
def test_a_compiler_that_cannot_be_started_is_told_and_leaves_nothing(
    lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    topologies.find_compiler()
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # Writes fail, as on a full disk.
    try:
        reports = compile_all([lowered, lowered])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [str(each.verdict) for each in reports.values()] == ["not compiled"] * 2
    assert "The compiler could not be started: Could not write " in reports[0].detail
    assert (len(os.listdir("/proc/self/fd")), list(tmp_path.iterdir())) == (before, [])


@needs_libtpu
def test_a_process_with_many_open_files_waits_for_compilers(lowered: Lowered) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert compile_all([lowered])[0].fits
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_libtpu
def test_folders_of_callers_that_were_killed_are_removed(
    lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, young, locked = (
        tmp_path / f"kinetic-compile-{each}" for each in ("left", "new", "held")
    )
    for each in (abandoned, young, locked):
        each.mkdir()
        (each / "module.mlir").touch()
    for each in (abandoned, locked):
        os.utime(each, (0, 0))
    lock = os.open(locked, os.O_RDONLY)
    try:
        locks.hold(lock)
        compile_all([lowered])
    finally:
        os.close(lock)
    assert {each.name for each in tmp_path.iterdir()} == {young.name, locked.name}


SAME_IN_EACH_FILE = """
import jax
import jax.numpy as jnp

def act(x):
    return jnp.sort(x @ x, axis=1) @ x
"""


@needs_libtpu
def test_a_kept_report_names_the_lines_of_the_file_that_is_compiled_now(tmp_path: Path) -> None:
    import jax

    target, square = CompileTarget(resolve("tpu-v6e-4")), jax.ShapeDtypeStruct((2048, 2048), "f4")
    named = []
    for number, text in enumerate((SAME_IN_EACH_FILE, f"# moved{SAME_IN_EACH_FILE}")):
        file = tmp_path / f"{number}.py"
        file.write_text(f"{chr(10) * number}{text}")
        space: dict[str, Any] = {}
        exec(compile(file.read_text(), file, "exec"), space)
        traced = lowering.lower(target, space["act"], (square,), {})
        module = traced.module if not number else b"never looked at"
        report = compile_all([Lowered(traced.program, module)], cache=tmp_path / "cache")[0]
        assert report.fits, report.detail
        named.append({buffer.source for buffer in report.buffers if buffer.source})
    assert named[0] == {f"{tmp_path}/0.py:6 (act)"}
    assert named[1] == {f"{tmp_path}/1.py:7 (act)"}


@needs_libtpu
def test_one_that_fails_is_told_beside_one_that_does_not(lowered: Lowered) -> None:
    broken = Lowered(lowered.program, b"no module")
    reports = compile_all([broken, lowered], at_once=2)
    assert [reports[number].verdict for number in (0, 1)] == [
        CompileVerdict.REFUSED,
        CompileVerdict.FITS,
    ]


@needs_libtpu
def test_a_compiler_that_does_not_end_is_ended(lowered: Lowered) -> None:
    report = compile_all([lowered], timeout_s=0.0)[0]
    assert report.verdict is CompileVerdict.NOT_COMPILED
    assert "did not finish within 0 s" in report.detail


def await_compiler(begun: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not begun():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_compiler(signum: int) -> None:
    """Wait until this process has started a compiler, then send the compiler a signal."""

    def find() -> list[int]:
        return [
            child
            for child in processes.children(os.getpid())
            if b"kinetic-compile-" in processes.command_line(child)
        ]

    await_compiler(lambda: bool(find()))
    os.kill(find()[0], signum)


@needs_libtpu
@pytest.mark.parametrize(
    ("signum", "message"),
    [
        (signal.SIGKILL, "most likely because memory ran out"),
        (signal.SIGSEGV, "The compiler crashed (SIGSEGV)"),
    ],
)
def test_a_compiler_that_dies_is_told_with_its_reason(
    lowered: Lowered, signum: int, message: str
) -> None:
    killer = threading.Thread(target=kill_compiler, args=(signum,))
    killer.start()
    report = compile_all([lowered])[0]
    killer.join()
    assert report.verdict is CompileVerdict.NOT_COMPILED
    assert message in report.detail


def write_interpreter(folder: Path, text: str) -> str:
    """Write a program in place of another environment's interpreter; return its path."""
    place = folder / "python"
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return str(place)


@needs_libtpu
def test_the_last_words_of_a_compiler_are_not_its_stack(
    lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words").write_text(
        "I1126 16:23:29.773 1 pjrt_api.cc:168] The PJRT plugin has API version 0.117.\n"
        "F1126 16:26:43.544 1 thread.cc:547] RAW: pthread_create failed\n"
        "    @     0x7f78c9242581  absl::raw_log_internal::RawLog()\n"
        f"https://symbolize.stripped_domain/r/?trace={'7f78c9242581,' * 200}\n"
    )
    compiler = write_interpreter(tmp_path, f"cat {tmp_path}/words >&2\nkill -ABRT $$")
    monkeypatch.setattr(sys, "executable", compiler)
    first, words = compile_all([lowered])[0].detail.split("\n")
    assert first == "The compiler crashed (SIGABRT). Its last output:"
    assert words.endswith("RAW: pthread_create failed")


@needs_libtpu
def test_leaving_the_loop_ends_the_compilers(lowered: Lowered) -> None:
    broken = Lowered(lowered.program, b"no module")
    compilers = Compilers(CompileTarget(resolve("tpu-v6e-4")), at_once=2)
    reports = compilers.compile([broken, lowered])
    next(reports)
    reports.close()
    commands = [processes.command_line(child) for child in processes.children(os.getpid())]
    assert not [line for line in commands if b"kinetic-compile-" in line]


@needs_libtpu
def test_a_topology_that_libtpu_refuses_is_said() -> None:
    target = CompileTarget(resolve("tpu-v3-4"))
    wrong = CompileTarget.from_json(
        target.to_json() | {"topology": target.topology.to_json() | {"shape": [3, 5]}}
    )
    program = LoweredProgram("step", (0,), "")
    with pytest.raises(UsageError, match="libtpu does not support 1 x v3:3x5"):
        topologies.describe(wrong)
    report = dict(Compilers(wrong).compile([Lowered(program, b"")]))[0]
    assert "libtpu does not support" in report.detail
