"""What is different in a notebook: cells have titles, and a display can change while its cell runs.
The door to IPython.

In: names of files, drawings. Out: titles of cells; a display in the running cell. IPython is used
only if this process has already imported it.
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
"""Shorter waits need no display."""
QUICK_S, CALM_S = 1.0, 5.0
"""Between two updates, in the first minute and later."""
_CALM_AFTER_S = 60.0


def kernel_shell() -> Any:
    """Return the shell if this process is a notebook's kernel, else None."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def cell_title(file: str) -> str:
    """Return the title of the cell that this file name stands for: "Cell In[3]"; "" for other
    files."""
    if "IPython" not in sys.modules:
        return ""
    from IPython.core.getipython import get_ipython

    named = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    title = named(file) if named is not None else None
    return " ".join(title) if title else ""


def open_display(
    draw: Callable[[Outcome | None], Mapping[str, str]], clock: Callable[[], float]
) -> Progress | None:
    """Return a display in a notebook's running cell, or None elsewhere."""
    if kernel_shell() is None or threading.current_thread() is not threading.main_thread():
        return None
    return Progress(draw, clock, _Display().show)


def draw_picture(picture: Picture) -> dict[str, str]:
    """Return a picture as displays take it."""
    from kinetic._client.board import drawing

    return {"text/html": drawing.html(picture), "text/plain": drawing.text(picture)}


class Progress:
    """A picture in the running cell, redrawn now and then if it has changed."""

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
        """Draw, if it is time to; the end is drawn only if something was drawn before."""
        now, over = self._clock(), over or outcome is not None
        if (not over and now < self._due) or (over and not self._last):
            return
        self._show_now(outcome)

    def before(self, output: bytes) -> None:
        """Take a place in the output before a line is begun: a display would split it, as with
        progress bars."""
        if not self._last and not output.endswith(b"\n"):
            self._show_now(None)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._last and kind is not None and issubclass(kind, KeyboardInterrupt | TimeoutError):
            self._leave(
                "The waiting was interrupted"
                if kind is KeyboardInterrupt
                else "The waiting has ended"
            )

    def _leave(self, why: str) -> None:
        """Say that the drawing no longer changes."""
        from html import escape  # not needed by scripts

        drawn, words = (
            self._draw(None),
            f"{why}; what runs goes on. This picture does not change any more.",
        )
        note = (
            "<div "
            f'style="font-family:system-ui,sans-serif;font-size:12px;opacity:.75">{escape(words)}</'
            "div>"
        )
        self._show(
            {
                "text/html": drawn["text/html"] + note,
                "text/plain": f"{drawn['text/plain']} · {words}",
            }
        )

    def _show_now(self, outcome: Outcome | None) -> None:
        now = self._clock()
        self._due = now + (QUICK_S if now - self._begun < _CALM_AFTER_S else CALM_S)
        drawn = self._draw(outcome)
        if drawn != self._last:
            self._last = drawn
            self._show(drawn)


class _Display:
    """One display in the output of the running cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, drawn: Mapping[str, str]) -> None:
        """Replace its content."""
        from IPython.core.display_functions import display

        if self._handle is None:
            self._handle = display(dict(drawn), raw=True, display_id=True)
        else:
            self._handle.update(dict(drawn), raw=True)
