"""Running a kubeconfig's login program, which may wait for its user.

In: a command, its environment. Out: what it printed; while it runs, its messages to the user, who
would otherwise see nothing for minutes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from kinetic._core.values import dataclass

QUIET_S = 2.0
"""A program that ends within this time has not waited for its user."""
PROMPT_S = 0.5
"""A line without an end for this long is a prompt."""
AFTER_S = 1.0
"""How long to wait for output once the program has ended: another process may hold its pipes."""
_TICK_S = 0.1


@dataclass(frozen=True)
class Ran:
    """How the program ended.

    Attributes:
        code: it exited with.
        output: its standard output.
        said: its standard error.
    """

    code: int
    output: bytes
    said: bytes


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    tell: Callable[[str], object],
    *,
    interactive: bool,
    limit_s: float,
    quiet_s: float = QUIET_S,
) -> Ran:
    """Run it to its end.

    Args:
        command, env: of the program.
        tell: hears what it says, line by line, once it takes longer than `quiet_s`.
        interactive: whether it may read from the terminal.
        limit_s: it is killed after this time.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it took too long.
    """
    begun = time.monotonic()
    output, said = b"", b""
    ended_at: float | None = None
    messages = _LoginMessages(tell, begun + quiet_s)
    with subprocess.Popen(
        command,
        env=dict(env),
        stdin=None if interactive else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            while True:
                try:
                    output, said = process.communicate(timeout=_TICK_S)
                    return Ran(process.returncode, output, said)
                except subprocess.TimeoutExpired as so_far:
                    output, said = so_far.output or output, so_far.stderr or said
                now = time.monotonic()
                if process.poll() is not None:
                    ended_at = ended_at or now
                    if now - ended_at >= AFTER_S:
                        return Ran(process.returncode, output, said)
                if now - begun >= limit_s:
                    raise subprocess.TimeoutExpired(command[0], limit_s)
                messages.hear(said, now)
        except BaseException:
            process.kill()
            raise


class _LoginMessages:
    """Tells what a program says, in whole lines as long as these end."""

    def __init__(self, tell: Callable[[str], object], tell_from: float) -> None:
        self._tell, self._tell_from = tell, tell_from
        self._heard, self._heard_at = 0, 0.0
        self._told = 0

    def hear(self, said: bytes, now: float) -> None:
        """Tell what is due of all that was said."""
        if len(said) > self._heard:
            self._heard, self._heard_at = len(said), now
        if now < self._tell_from:
            return
        is_prompt = now - self._heard_at >= PROMPT_S
        end = len(said) if is_prompt else said.rfind(b"\n") + 1
        new, self._told = said[self._told : end], max(self._told, end)
        for line in new.decode(errors="replace").splitlines():
            if line.strip():
                self._tell(line.rstrip())
