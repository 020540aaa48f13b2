"""The loggers that a script configures, which its function finds configured alike on a host."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from kinetic._pickling import call, library_settings

NAME = "loggers_test"


class Redacting(logging.Formatter):
    secret = "s3cret"

    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A logger of the script, below Python's root logger without the handlers of pytest."""
    monkeypatch.setattr(logging.root, "handlers", _NoneOfPytest())
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    return logging.getLogger(NAME)


class _NoneOfPytest(list[logging.Handler]):
    def append(self, handler: logging.Handler) -> None:
        if not type(handler).__module__.startswith("_pytest."):
            super().append(handler)


def send(func: Callable[[], object], on_host: Callable[[], object] = lambda: None) -> None:
    """Pickle a function, reset the loggers as on a new host, and unpickle and call the function."""
    data = call.pack(func, (), {}, env_vars={}).data
    for logger in (logging.root, logging.getLogger(NAME)):
        logger.handlers.clear()
        logger.filters.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
    on_host()
    call.unpack(data)[0]()


def work() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(NAME).log(level, "level %d", level)


def test_the_root_is_as_basic_config_made_it(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.basicConfig(level=logging.INFO, format="{name}: {message}", style="{")
    send(work)
    assert capsys.readouterr().err == f"{NAME}: level 20\n{NAME}: level 30\n"


def test_a_logger_keeps_its_level_and_handlers(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for stream in (sys.stdout, sys.stderr):
        log.addHandler(logging.StreamHandler(stream))
        log.handlers[-1].setFormatter(Redacting("%(levelno)d %(message)s"))
    log.handlers[1].setLevel(logging.WARNING)
    send(work)
    assert capsys.readouterr() == ("10 level 10\n20 level 20\n30 level 30\n", "30 level 30\n")


def test_a_call_ships_the_same_after_googles_client_has_set_its_logger(log: logging.Logger) -> None:
    def packed() -> bytes:
        return call.pack(work, (), {}, env_vars={}).data

    before = packed()
    google = logging.getLogger("google")
    google.propagate = False
    assert packed() == before
    google.setLevel(logging.DEBUG)  # a setting of the program
    assert packed() != before


@pytest.mark.parametrize("on_handler", [False, True])
def test_a_logger_with_a_filter_stays_as_it_is_there(
    on_handler: bool, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setLevel(logging.DEBUG)
    log.addHandler(logging.StreamHandler())
    (log.handlers[0] if on_handler else log).addFilter(lambda record: "secret" not in record.msg)
    send(work)
    assert capsys.readouterr().err == "level 30\n"


def test_odd_handlers_are_no_fault(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(logging.Handler):
        @property
        def stream(self) -> Any:
            raise RuntimeError("no stream yet")

    log.handlers[:] = [Odd(), logging.NullHandler(), logging.StreamHandler()]
    log.handlers[2].setFormatter(logging.Formatter("plain text", validate=False))
    send(work)
    assert capsys.readouterr().err == "plain text\n"


def test_a_logger_without_output_stays_silent(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.basicConfig(level=logging.DEBUG)
    log.addHandler(logging.NullHandler())
    log.propagate = False
    send(work, lambda: log.addHandler(logging.NullHandler()))
    assert capsys.readouterr().err == ""


def test_handlers_that_a_host_has_are_not_doubled(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line comes twice if a module on the host, or the function, adds a handler as well."""

    def add_and_work() -> None:
        logging.getLogger(NAME).addHandler(logging.StreamHandler())
        work()

    def send_again(func: Callable[[], None], on_host: Callable[[], object] = lambda: None) -> None:
        log.handlers[:], log.propagate = [logging.StreamHandler()], False
        send(func, on_host)

    send_again(work, lambda: logging.getLogger(NAME).addHandler(logging.StreamHandler()))
    send_again(add_and_work)
    send_again(work)
    send_again(work)
    assert capsys.readouterr().err == "level 30\n" * 4


def test_what_a_library_left_before_the_fork_writes_nothing_twice(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root handlers that a library added before hosts were forked, as Orbax does when imported, are
    removed. Handlers of the user's modules stay, wherever they write."""
    streams = [open(2, "w", closefd=False) for _ in range(2)]

    def leave() -> None:
        logging.root.handlers.append(logging.StreamHandler(streams[0]))
        library_settings.mark_handlers()
        logging.root.handlers.append(logging.StreamHandler(streams[1]))

    logging.basicConfig(format="%(name)s: %(message)s")
    send(work, leave)
    assert capsys.readouterr().err == f"{NAME}: level 30\n"
    assert [getattr(each, "stream", None) for each in logging.root.handlers] == [
        streams[1],
        sys.stderr,
    ]


def test_a_handler_left_before_the_fork_goes_where_the_script_has_none(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """A script that logs to a file alone has no handler that is sent, but its host has the root
    handler of a library that was imported early: it must not format the function's lines."""
    logging.root.addHandler(logging.FileHandler(tmp_path / "log", delay=True))

    def leave() -> None:
        logging.root.handlers.append(logging.StreamHandler())
        logging.root.handlers[-1].setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        library_settings.mark_handlers()

    send(work, leave)
    assert capsys.readouterr().err == "level 30\n"


def test_what_writes_elsewhere_stays_here(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    log.addHandler(logging.FileHandler(tmp_path / "log", delay=True))
    log.propagate = False
    send(work)
    assert capsys.readouterr().err == "level 30\n", "as nothing does it there, the root does"
    assert not (tmp_path / "log").exists()


def test_the_console_of_rich_is_the_output(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.Handler()
    vars(handler)["console"] = types.SimpleNamespace(file=sys.stdout)
    logging.root.addHandler(handler)
    send(work)
    assert capsys.readouterr().out == f"WARNING:{NAME}:level 30\n"


def test_absl_is_as_verbose_as_here(log: logging.Logger) -> None:
    absl = pytest.importorskip("absl.logging")
    before = absl.get_verbosity()
    absl.set_verbosity(absl.INFO)
    try:
        send(absl.get_verbosity, lambda: absl.set_verbosity(absl.WARNING))
        assert absl.get_verbosity() == absl.INFO
    finally:
        absl.set_verbosity(before)
