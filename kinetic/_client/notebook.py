"""Notebook support: titles of cells, a drawing that is updated while its cell runs, and `%kinetic`.

The only module that imports IPython, and only if this process has already imported it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinetic._client.board.drawing import Picture
    from kinetic._core.outcome import Outcome

SHOWN_AFTER_S = 0.5
"""Nothing is drawn for waits shorter than this many seconds."""
QUICK_S, CALM_S = 1.0, 5.0
"""Seconds between two updates of the drawing: in the first minute, and after it."""
_CALM_AFTER_S = 60.0


def kernel_shell() -> Any:
    """Return the shell if this process is a notebook's kernel, else None."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def add_magic() -> None:
    """Add the magic `%kinetic` to the shell, if this process is IPython or a notebook's kernel."""
    from IPython.core.getipython import get_ipython

    if (shell := get_ipython()) is not None:
        shell.register_magic_function(kinetic_magic, "line", "kinetic")


def kinetic_magic(line: str) -> None:
    """Implement the magic: `%kinetic session NAME` runs later calls on this session, `%kinetic
    session off` undoes that."""
    from IPython.core.error import UsageError

    from kinetic._client.board import console
    from kinetic._config import settings
    from kinetic._store import sessions
    from kinetic._store.open import open_store

    command, *names = line.split() or [""]
    if command != "session" or len(names) > 1:
        raise UsageError(
            "%kinetic session NAME runs later calls on this session, %kinetic session off undoes "
            "that, and %kinetic session shows which session is used."
        )
    if names == ["off"]:
        settings.choose_session(None)
    elif names:
        store = open_store(settings.load().store)
        if sessions.find(store, names[0]) is None:
            raise UsageError(
                f"There is no session {names[0]!r} in {store.uri}. Start it: "
                f'kinetic.session("tpu-v6e-8", name="{names[0]}")'
            )
        settings.choose_session(names[0])
    setting = settings.load().setting("session")
    by = "" if setting.source == settings.FLAG else f" (from {setting.source})"
    console.notice(
        f"kinetic: calls run on the session {setting.value}{by}."
        if setting.value
        else "kinetic: no session is in use, so each call gets its own machines.",
        repeat=True,
    )


def cell_title(file: str) -> str:
    """Return the title of the cell with this file name, as "Cell In[3]"; "" for other files."""
    if "IPython" not in sys.modules:
        return ""
    from IPython.core.getipython import get_ipython

    format_name = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    title = format_name(file) if format_name is not None else None
    return " ".join(title) if title else ""


def open_display(
    draw: Callable[[Outcome | None], Mapping[str, str]], clock: Callable[[], float]
) -> Progress | None:
    """Return a drawing in the running cell; None if this thread is not a notebook's main thread."""
    if kernel_shell() is None or threading.current_thread() is not threading.main_thread():
        return None
    handle: Any = None

    def show(drawn: Mapping[str, str]) -> None:
        """Replace the content of one display in the output of the cell."""
        from IPython.core.display_functions import display

        nonlocal handle
        if handle is None:
            handle = display(dict(drawn), raw=True, display_id=True)
        else:
            handle.update(dict(drawn), raw=True)

    return Progress(draw, clock, show)


def draw_picture(picture: Picture) -> dict[str, str]:
    """Return a picture as a MIME bundle: HTML and plain text."""
    from kinetic._client.board import drawing

    return {"text/html": drawing.html(picture), "text/plain": drawing.text(picture)}


class Progress:
    """A drawing in the running cell, updated every few seconds if it has changed."""

    def __init__(
        self,
        draw: Callable[[Outcome | None], Mapping[str, str]],
        clock: Callable[[], float],
        show: Callable[[Mapping[str, str]], object],
    ) -> None:
        self._draw = draw
        self._clock = clock
        self._show = show
        self._begun = clock()
        self._due = self._begun + SHOWN_AFTER_S
        self._last: Mapping[str, str] = {}

    def __call__(self, outcome: Outcome | None = None, *, over: bool = False) -> None:
        """Update the drawing if an update is due. When the wait is over, or `outcome` gives the
        verdict, update it only if it was ever shown."""
        now, over = self._clock(), over or outcome is not None
        if (not over and now < self._due) or (over and not self._last):
            return
        self._show_now(outcome)

    def before(self, output: bytes) -> None:
        """Show the drawing now if `output` does not end with a newline, as a progress bar does not:
        a drawing shown later would split that line."""
        if not self._last and not output.endswith(b"\n"):
            self._show_now(None)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._last and kind is not None and issubclass(kind, KeyboardInterrupt | TimeoutError):
            self._freeze(
                "The wait was interrupted" if kind is KeyboardInterrupt else "The wait has ended"
            )

    def _freeze(self, why: str) -> None:
        """Write below the drawing that it is no longer updated, because of `why`."""
        from html import escape  # not needed by scripts

        drawn = self._draw(None)
        style = "font-family:system-ui,sans-serif;font-size:12px;opacity:.75"
        words = f"{why}; running jobs keep running. This drawing is no longer updated."
        html = f'{drawn["text/html"]}<div style="{style}">{escape(words)}</div>'
        self._show({"text/html": html, "text/plain": f"{drawn['text/plain']} · {words}"})

    def _show_now(self, outcome: Outcome | None) -> None:
        now = self._clock()
        self._due = now + (QUICK_S if now - self._begun < _CALM_AFTER_S else CALM_S)
        drawn = self._draw(outcome)
        if drawn != self._last:
            self._last = drawn
            self._show(drawn)
