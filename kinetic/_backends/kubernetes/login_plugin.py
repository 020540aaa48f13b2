"""Running a kubeconfig's login program, which may wait for its user.

In: a command, its environment. Out: what it printed; while it runs, its messages to the user, who
would otherwise see nothing for minutes.
"""

from __future__ import annotations

import os
import selectors
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
    with subprocess.Popen(
        command,
        env=dict(env),
        stdin=None if interactive else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            said = _Said(tell, begun + quiet_s)
            output = _attend(process, said, begun + limit_s)
            code = process.wait(max(0.0, begun + limit_s - time.monotonic()))
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(command[0], limit_s) from None
            raise
    return Ran(code, output, bytes(said.all))


class _Said:
    """What a program says, told in whole lines as long as these end."""

    def __init__(self, tell: Callable[[str], object], tell_from: float) -> None:
        self.all = bytearray()
        self._tell, self._tell_from = tell, tell_from
        self._told = 0
        self._heard_at = 0.0

    def hear(self, part: bytes) -> None:
        """More was said."""
        self.all += part
        self._heard_at = time.monotonic()

    def pass_on(self) -> None:
        """Tell what is due."""
        now = time.monotonic()
        if now < self._tell_from:
            return
        end = self.all.rfind(b"\n") + 1
        if now - self._heard_at >= PROMPT_S:
            end = len(self.all)
        new, self._told = bytes(self.all[self._told : end]), max(self._told, end)
        for line in new.decode(errors="replace").splitlines():
            if line.strip():
                self._tell(line.rstrip())


def _attend(process: subprocess.Popen[bytes], said: _Said, until: float) -> bytes:
    """Read both streams to their ends; return the standard output."""
    assert process.stdout is not None
    assert process.stderr is not None
    output = bytearray()
    ended_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for stream, hear in ((process.stdout, output.extend), (process.stderr, said.hear)):
            selector.register(stream, selectors.EVENT_READ, hear)
        while selector.get_map():
            now = time.monotonic()
            if now >= until:
                raise subprocess.TimeoutExpired("", 0.0)
            if process.poll() is not None:
                ended_at = ended_at or now
                if now - ended_at >= AFTER_S:
                    break
            for key, _ in selector.select(0.1):
                part = os.read(key.fd, 65536)
                if part:
                    key.data(part)
                else:
                    selector.unregister(key.fileobj)
            said.pass_on()
    return bytes(output)
