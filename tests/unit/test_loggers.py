"""What a script does to its loggers holds for its function on a host."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from kinetic._pickling import call

NAME = "loggers_test"


class Upper(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).upper()


class Unpicklable(logging.Formatter):
    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A logger of the script. The root is as Python makes it: pytest's own handlers are none."""
    monkeypatch.setattr(logging.root, "handlers", _NoneOfPytest())
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    return logging.getLogger(NAME)


class _NoneOfPytest(list[logging.Handler]):
    def append(self, handler: logging.Handler) -> None:
        if not type(handler).__module__.startswith("_pytest."):
            super().append(handler)


def send(func: Callable[[], object], on_host: Callable[[], object] = lambda: None) -> None:
    """Call a function as a host would, whose loggers are as Python makes them."""
    data = call.pack(func, (), {}, env_vars={}).data
    for each in (logging.root, logging.getLogger(NAME)):
        each.handlers.clear()
        each.filters.clear()
        each.propagate = True
        each.setLevel(logging.WARNING if each is logging.root else logging.NOTSET)
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


def test_a_logger_keeps_its_level_handlers_and_filters(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addFilter(lambda record: record.levelno != logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        log.addHandler(logging.StreamHandler(stream))
        log.handlers[-1].setFormatter(Upper())
    log.handlers[0].addFilter(lambda record: record.levelno < logging.WARNING)
    log.handlers[1].setLevel(logging.WARNING)
    send(work)
    assert capsys.readouterr() == ("LEVEL 10\n", "LEVEL 30\n")


@pytest.mark.parametrize("name", ["pickle", "kinetic.pickling"])
def test_libraries_add_their_own_handlers(
    name: str, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    of_library = logging.getLogger(name)
    of_library.addHandler(logging.StreamHandler())
    of_library.handlers[0].setFormatter(logging.Formatter("twice %(message)s"))
    send(work, of_library.handlers.clear)
    of_library.warning("once")
    assert capsys.readouterr().err == "level 30\nonce\n"  # Python's last resort writes them.


def test_handlers_that_a_host_has_are_not_doubled(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.basicConfig()
    send(work, logging.basicConfig)
    send(work)
    send(work)
    assert capsys.readouterr().err == f"WARNING:{NAME}:level 30\n" * 3


def test_what_writes_elsewhere_or_cannot_be_sent_stays_here(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    log.addHandler(logging.FileHandler(tmp_path / "log", delay=True))
    logging.root.addHandler(logging.StreamHandler())
    logging.root.handlers[0].setFormatter(Unpicklable())
    send(work)
    assert capsys.readouterr().err == "level 30\n"
    assert not (tmp_path / "log").exists()


def test_the_console_of_rich_is_the_output(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.Handler()
    vars(handler)["console"] = types.SimpleNamespace(file=sys.stdout)
    logging.root.addHandler(handler)
    send(work)
    assert capsys.readouterr().out == "level 30\n"


def test_absl_is_as_verbose_as_here(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    absl = pytest.importorskip("absl.logging")
    before = absl.get_verbosity()
    absl.set_verbosity(absl.INFO)
    absl.use_absl_handler()
    try:
        send(lambda: absl.info("told"), lambda: absl.set_verbosity(absl.WARNING))
        assert capsys.readouterr().err.endswith("] told\n")
    finally:
        absl.set_verbosity(before)
