"""Record each error, warning and notice that a Python process makes, and the line that made it.

`python tests/messages.py --record` starts this in every process of the test environment by a `.pth`
file, also on simulated hosts. `start` patches the classes and functions of `SOURCES` as soon as
their modules are imported. It imports no module that tests expect to be imported late.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

SOURCES = {
    "warnings": ("warn",),
    "logging": ("Logger.handle",),
    "kinetic.errors": ("KineticError.__new__",),
    "kinetic._core.findings": ("ok", "warn", "problem"),
    "kinetic._backends.kubernetes.findings": ("JobDiagnosis.__init__",),
    "kinetic._client.board.console": ("notice",),
    "kinetic.cli.output": ("notice",),
    "kinetic._host.bootstrap": ("Failed.__init__",),
    "kinetic._host.worker.streams": ("say",),
    "kinetic._host.agent.log_writer": ("HostLog.say",),
    "kinetic._host.worker.metric_sender": ("Sender.say",),
    "kinetic._in_job.checkpoint.checkpointer": ("Checkpointer._say", "Checkpointer._warn"),
    "kinetic._host.story": ("Story._say",),
}
"""Functions whose string arguments are messages, by module."""
PACKAGE = f"{os.sep}kinetic{os.sep}"
PER_LINE = 30
"""Largest number of texts that one process records for one line of the product."""


def start(folder: str) -> None:
    """Record messages of this process and of its forks in a folder."""
    recorder = Recorder(folder)
    imported = builtins.__import__

    def import_and_patch(name: str, *more: Any, **options: Any) -> Any:
        module = imported(name, *more, **options)
        if recorder.pending:
            recorder.patch_imported()
        return module

    builtins.__import__ = import_and_patch


class Recorder:
    def __init__(self, folder: str) -> None:
        self.pending = dict(SOURCES)
        self._folder = folder
        self._written: dict[tuple[str, int], set[str]] = {}

    def patch_imported(self) -> None:
        for name in [name for name in self.pending if _is_imported(name)]:
            for path in self.pending.pop(name):
                *owners, attribute = path.split(".")
                owner: Any = sys.modules[name]
                for part in owners:
                    owner = getattr(owner, part)
                wrap = {"__new__": self._wrap_new, "handle": self._wrap_handle}
                function = getattr(owner, attribute)
                setattr(owner, attribute, wrap.get(attribute, self._wrap)(function))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        module = getattr(function, "__module__", "")  # An inherited method may have none.

        def call(*arguments: Any, **options: Any) -> Any:
            self._record(sys._getframe(1), (*arguments, *options.values()))
            if module in ("warnings", "_warnings"):
                options["stacklevel"] = options.get("stacklevel", 1) + 1
            return function(*arguments, **options)

        call.__name__, call.__module__ = function.__name__, module
        return call

    def _wrap_new(self, function: object) -> Callable[..., Any]:
        def make(cls: Any, *arguments: Any, **options: Any) -> Any:
            self._record(sys._getframe(1), arguments)
            base = OSError if issubclass(cls, OSError) else Exception
            return base.__new__(cls, *arguments)

        return make

    def _wrap_handle(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def handle(logger: Any, row: Any) -> None:
            if logger.name.startswith("kinetic") and row.levelno >= 30:
                self._write(row.pathname, row.lineno, row.getMessage())
            function(logger, row)

        return handle

    def _record(self, frame: FrameType, arguments: tuple[Any, ...]) -> None:
        texts = [str(text) for text in arguments if isinstance(text, str)]
        if texts:
            self._write(frame.f_code.co_filename, frame.f_lineno, "\n".join(texts))

    def _write(self, path: str, line: int, text: str) -> None:
        import json

        _, is_ours, file = path.rpartition(PACKAGE)
        texts = self._written.setdefault((file, line), set())
        if not is_ours or text in texts or len(texts) >= PER_LINE:
            return
        texts.add(text)
        try:
            with open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "a") as rows:
                rows.write(json.dumps([file, line, text]) + "\n")
        except OSError:
            pass


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
