"""The pure parts of the command line: durations, programs, prefixes of log lines, tables, exit
codes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic import errors
from kinetic._client.board import text
from kinetic._client.board.line_prefix import Prefixer
from kinetic._core import checks
from kinetic._core.duration import parse_duration_s
from kinetic._core.exits import Exit
from kinetic._core.log_format import STDOUT, LogChunk
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic.cli import exit_codes, program
from kinetic.cli.program import Program, ProgramKind

VALUE_OPTIONS = {"-a", "--accelerator", "--name", "-m", "--module"}


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("10", 10),
        ("10s", 10),
        ("1.5m", 90),
        ("2h", 7200),
        ("1h30m", 5400),
        ("7d", 604800),
        ("1w", 604800),
        ("250ms", 0.25),
        (" 5M ", 300),
    ],
)
def test_duration(words: str, seconds: float) -> None:
    assert parse_duration_s(words) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "s",
        "0",
        "-3",
        "-3s",
        "nan",
        "inf",
        "3 parsecs",
        "5m-",
        "1..2s",
        "m5",
        "5mm",
        "٣s",
        "1e999",
    ],
)
def test_no_duration(words: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_duration_s(words)


@given(st.text())
def test_any_text_is_a_duration_above_zero_or_refused(words: str) -> None:
    try:
        seconds = parse_duration_s(words)
    except ValueError:
        return
    assert seconds > 0
    assert math.isfinite(seconds)


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        ("-a cpu train.py -a x", "-a cpu", Program(ProgramKind.SCRIPT, "train.py", ("-a", "x"))),
        (
            "--accelerator=cpu train.py -- x",
            "--accelerator=cpu",
            Program(ProgramKind.SCRIPT, "train.py", ("--", "x")),
        ),
        ("-acpu -d train.py", "-acpu -d", Program(ProgramKind.SCRIPT, "train.py")),
        ("-da cpu train.py", "-da cpu", Program(ProgramKind.SCRIPT, "train.py")),
        (
            "-a cpu -m pkg.mod --name x",
            "-a cpu",
            Program(ProgramKind.MODULE, "pkg.mod", ("--name", "x")),
        ),
        ("-mpkg.mod -d", "", Program(ProgramKind.MODULE, "pkg.mod", ("-d",))),
        ("--module=pkg.mod", "", Program(ProgramKind.MODULE, "pkg.mod")),
        ("-a cpu -- ls -l", "-a cpu", Program(ProgramKind.COMMAND, "ls", ("-l",))),
        ("--name -- -- ls", "--name --", Program(ProgramKind.COMMAND, "ls")),
        ("-a cpu -- train.py", "-a cpu", Program(ProgramKind.COMMAND, "train.py")),
        ("--help", "--help", None),
        ("-a cpu --", "-a cpu", None),
        ("-a cpu -m", "-a cpu", None),
        ("-a", "-a", None),
        ("", "", None),
    ],
)
def test_options_end_where_the_program_begins(
    words: str, options: str, expected: Program | None
) -> None:
    assert program.split(words.split(), VALUE_OPTIONS) == (options.split(), expected)


@given(st.lists(st.text(max_size=8), max_size=8))
def test_no_word_is_lost(words: list[str]) -> None:
    before, after = program.split(["-a", "cpu", "--", "cmd", *words], VALUE_OPTIONS)
    assert (before, after) == (["-a", "cpu"], Program(ProgramKind.COMMAND, "cmd", tuple(words)))


def test_a_program_that_cannot_run_is_refused(tmp_path) -> None:
    for bad in (
        None,
        Program(ProgramKind.SCRIPT, str(tmp_path)),
        Program(ProgramKind.SCRIPT, str(tmp_path / "absent.py")),
        Program(ProgramKind.MODULE, ""),
        Program(ProgramKind.COMMAND, "ls", ("a\0b",)),
    ):
        with pytest.raises(errors.UsageError):
            program.check(bad)
    with pytest.raises(errors.UsageError, match="-- ls"):
        program.check(Program(ProgramKind.SCRIPT, "ls"))


def chunk(data: bytes, host: int = 0, time_ns: int = 1_700_000_000_123_456_789) -> LogChunk:
    return LogChunk(host, STDOUT, time_ns, data)


def marked(*chunks: LogChunk, **options: bool) -> bytes:
    prefixer = Prefixer(**options)
    return b"".join(map(prefixer.add, chunks)) + prefixer.end()


def test_bytes_are_untouched_without_marks() -> None:
    odd = b"\xff[rank0] \x1b[31m arr[i]\r\n no end"
    assert marked(chunk(odd)) == odd


def test_each_line_is_marked_once() -> None:
    assert marked(chunk(b"a\nb\n", 3), hosts=True) == b"[host 3] a\n[host 3] b\n"
    assert marked(chunk(b"\n\n", 1), hosts=True) == b"[host 1] \n[host 1] \n"
    assert marked(chunk(b""), hosts=True) == b""


def test_an_open_line_goes_on_without_a_second_mark() -> None:
    assert marked(chunk(b"a"), chunk(b"b\nc\n"), hosts=True) == b"[host 0] ab\n[host 0] c\n"


def test_two_hosts_never_share_a_line() -> None:
    assert (
        marked(chunk(b"a", 0), chunk(b"x\n", 1), chunk(b"b", 0), hosts=True)
        == b"[host 0] a\n[host 1] x\n[host 0] b\n"
    )


def test_times() -> None:
    assert marked(chunk(b"a\n"), times=True) == b"2023-11-14T22:13:20.123Z a\n"
    assert (
        marked(chunk(b"a\n", 2), times=True, hosts=True) == b"2023-11-14T22:13:20.123Z [host 2] a\n"
    )
    for lost in (0, 2**64 - 1):
        assert marked(chunk(b"a\n", time_ns=lost), times=True) == b"????-??-??T??:??:??.???Z a\n"


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20)), max_size=12))
def test_marks_lose_nothing(parts: list[tuple[int, bytes]]) -> None:
    """The output of each host is whole and in order; a line that another host interrupts continues
    on a new line."""
    out = marked(*(chunk(data, host) for host, data in parts), hosts=True)
    assert not out or out.endswith(b"\n")
    for host in range(3):
        mark = b"[host %d] " % host
        lines = [line[len(mark) :] for line in out.split(b"\n") if line.startswith(mark)]
        printed = b"".join(data for who, data in parts if who == host)
        if not any(b"[host" in data for _, data in parts):
            assert b"".join(lines) == printed.replace(b"\n", b"")


def test_durations() -> None:
    seconds = (-1, 0, 0.04, 0.44, 8.21, 45.9, 119, 120, 755, 7199, 7200, 11100, 172800)
    texts = [
        "0.0s",
        "0.0s",
        "0.04s",
        "0.4s",
        "8.2s",
        "45s",
        "119s",
        "2m00s",
        "12m35s",
        "119m59s",
        "2h00m",
        "3h05m",
        "48h00m",
    ]
    assert [text.duration(s) for s in seconds] == texts


def test_ages_and_sizes() -> None:
    seconds = (-1, 0, 0.03, 0.44, 59, 119, 120, 7199, 7200, 172799, 172800)
    assert [text.age(s) for s in seconds] == [
        "0s",
        "0s",
        "0.03s",
        "0.4s",
        "59s",
        "119s",
        "2m",
        "119m",
        "2h",
        "47h",
        "2d",
    ]
    assert [text.size(b) for b in (0, 1023, 1024, 1536, 2**40, 2**60)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 TiB",
        "1048576.0 TiB",
    ]


def test_tables_are_aligned_and_whole() -> None:
    assert text.align_table(("A", "BB"), [("xxx", "1"), ("y", "22")]) == "A    BB\nxxx  1\ny    22"
    assert text.align_table(("A",), []) == "A"


@given(st.text())
def test_what_is_printed_of_a_record_cannot_steer_the_terminal(name: str) -> None:
    assert text.printable("x" + name).isprintable()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.PicklingError("x"), 2),
        (errors.NotFound("x"), 3),
        (errors.PreflightError("x"), 4),
        (errors.InsufficientMemory("x"), 4),
        (errors.SubmitError("x"), 4),
        (errors.StoreFull("x"), 5),
        (errors.CorruptRecord("x"), 5),
        (errors.HostLost("x"), 1),
        (errors.GangTimeout("x"), 1),
        (errors.JobTimeout("x"), 1),
        (errors.CoordinatorLost("x"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), 1),
    ],
)
def test_exit_codes_of_errors(error: BaseException, code: int) -> None:
    assert exit_codes.of_error(error) == code


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (HostReport(1, Exit.SYS_EXIT, exit_code=7), 7),
        (HostReport(1, Exit.SYS_EXIT, exit_code=256), 1),
        (HostReport(1, Exit.SYS_EXIT, exit_code=-1), 255),
        (HostReport(1, Exit.OS_EXIT, exit_code=9), 9),
        (HostReport(1, Exit.SIGNAL, signal=11), 139),
        (HostReport(1, Exit.OUT_OF_MEMORY, signal=9), 137),
        (HostReport(1, Exit.RAISED, exit_code=3), 1),
        (HostReport(1, Exit.SYS_EXIT), 1),
    ],
)
def test_a_program_passes_its_own_code_on(report: HostReport, code: int) -> None:
    outcome = Outcome(
        Verdict.FAILED, blamed=(1,), reports=(HostReport(0, Exit.STOPPED, exit_code=0), report)
    )
    assert exit_codes.of_program(outcome) == code


def test_a_program_without_a_guilty_host_fails_with_1() -> None:
    assert exit_codes.of_program(Outcome(Verdict.FAILED)) == 1


def test_a_flag_for_slices_is_corrected_as_it_is_written():
    with pytest.raises(errors.UsageError, match=r"--slices takes .* write 2:3, not 3:2\."):
        checks.slices("--slices", (3, 2))
    with pytest.raises(
        errors.UsageError, match=r"--slices=1:1 has .* Write --slices=1 with --retr"
    ):
        checks.slices("--slices", (1, 1))
