"""Containers as processes: their states, outputs and exits.

The log of a `Container` can be read and followed. A thread calls `on_news` when a container has
started or ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from doubles.cluster.objects import nano_stamp

LINE_LIMIT, BYTE_LIMIT = 80, 2048
"""Limits of the part of a failed container's log that its message has: lines and bytes."""
READ_BYTES = 1 << 16
CHECK_S = 0.2
ALONE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Variables that keep NumPy from starting threads when it is imported."""


class Log:
    """The output of a container, by lines, each with the time of its end."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, bytes]] = []
        self._rest = b""
        self._changed = threading.Condition()
        self.closed = False

    def add(self, data: bytes) -> None:
        with self._changed:
            *whole, self._rest = (self._rest + data).split(b"\n")
            now = time.time_ns()
            for line in whole:
                # Every line needs a different time.
                at = max(now, self._lines[-1][0] + 1) if self._lines else now
                self._lines.append((at, line + b"\n"))
            if whole:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._rest:
                self._lines.append((time.time_ns(), self._rest))
                self._rest = b""
            self.closed = True
            self._changed.notify_all()

    def read(
        self,
        *,
        timestamps: bool = False,
        tail: int | None = None,
        since_ns: int = 0,
        follow: bool = False,
    ) -> Iterator[bytes]:
        """Yield the lines as they come; with `follow`, until the container ends. An empty piece
        comes now and then, so that the server can notice a client that has disconnected."""
        with self._changed:
            held = self._lines
            position = next((i for i, (at, _) in enumerate(held) if at >= since_ns), len(held))
            if tail is not None:
                position = max(position, len(held) - tail)
        while True:
            with self._changed:
                if follow and position >= len(self._lines) and not self.closed:
                    self._changed.wait(CHECK_S)
                lines, position = self._lines[position:], len(self._lines)
                over = self.closed
            mark = [nano_stamp(at).encode() + b" " for at, _ in lines] if timestamps else None
            yield b"".join((mark[i] + line if mark else line) for i, (_, line) in enumerate(lines))
            if not follow or over:
                return

    def end(self) -> str:
        """Return the last lines of the output, for the message of a failed container."""
        with self._changed:
            text = b"".join(line for _, line in self._lines[-LINE_LIMIT:])[-BYTE_LIMIT:]
        return text.decode(errors="replace")


class Container:
    """A container, whose processes run on this machine."""

    def __init__(self) -> None:
        self.log = Log()
        self.pid: int | None = None
        self.error: str | None = None
        self.exit: int | None = None
        self.signal = 0
        self.started_at = self.ended_at = 0.0

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.exit is None

    def kill(self, number: int) -> None:
        if self.alive:
            assert self.pid is not None
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


class _Shims:
    """The process from which shims are forked, after it has imported modules such as JAX. It is
    started for the first cluster, and ends with this process."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._wire: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self) -> socket.socket:
        """Fork a shim; return the socket for messages to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.send(b"x", [theirs.fileno()])
        return ours

    def send(self, message: bytes, fds: list[int]) -> None:
        """Send a message to `shim.main`."""
        with self._lock:
            if self._wire is None:
                self._wire = self._start()
                atexit.register(self._close)
            socket.send_fds(self._wire, [message], fds)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("shim.py")
        env = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(theirs.fileno()), *self._modules],
                env=env | ALONE,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def _close(self) -> None:
        assert self._wire is not None
        assert self._process is not None
        self._wire.close()
        self._process.wait()


_shims = {True: _Shims("numpy", "jax"), False: _Shims()}


def has_jax(env: dict[str, str]) -> bool:
    """True if a container is one of several hosts: only such a host may import JAX in advance."""
    return int(env.get("KINETIC_HOSTS", "1")) > 1 or "KINETIC_CREDENTIALS" in env


class Program:
    """A host forked from a shim (see `shim`), with the interface of `subprocess.Popen`."""

    def __init__(self, wanted: dict[str, Any], output: int, fds: tuple[int, ...]) -> None:
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        news, telling = os.pipe()
        message = json.dumps(wanted | {"deaf": False, "blocked": blocked}).encode()
        _shims[has_jax(wanted["env"])].send(message, [output, telling, *fds])
        os.close(telling)
        with os.fdopen(news) as reader:
            self.pid = int(reader.read())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Do nothing: the shim reaps the process."""


class Runtime:
    """Starts containers, and ends all of them when it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = 0
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wires: dict[bool, socket.socket] = {}
        self._woken, self._waker = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._listen, name="containers", daemon=True)
        self._thread.start()

    def _shim(self, env: dict[str, str]) -> socket.socket:
        """Return the socket to the shim for containers with this environment; fork it if needed."""
        with self._lock:
            if (key := has_jax(env)) not in self._wires:
                self._wires[key] = _shims[key].fork()
            return self._wires[key]

    def start(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        on_news: Callable[[], None],
        *,
        deaf: bool = False,
    ) -> Container:
        container = Container()
        with self._lock:
            self._numbers += 1
            path = self._folder / f"start-{self._numbers}.json"
        wanted = {"argv": argv, "env": env, "cwd": str(cwd), "deaf": deaf}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(wanted, file)
        output, printing = os.pipe()
        news, telling = os.pipe()
        with self._lock:
            for fd, what in ((output, "output"), (news, "news")):
                os.set_blocking(fd, False)
                self._selector.register(
                    fd, selectors.EVENT_READ, (what, container, on_news, bytearray())
                )
            os.write(self._waker, b"x")
        socket.send_fds(self._shim(env), [os.fsencode(path)], [printing, telling])
        os.close(printing)
        os.close(telling)
        return container

    def close(self) -> None:
        """End all containers."""
        for wire in self._wires.values():
            wire.shutdown(socket.SHUT_WR)
            wire.recv(1)  # This returns when the other end is closed.
            wire.close()
        os.close(self._waker)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _listen(self) -> None:
        open_ends: dict[int, int] = {}
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if not os.read(key.fd, 4096):
                        return
                    continue
                what, container, on_news, pending = key.data
                try:
                    data = os.read(key.fd, READ_BYTES)
                except BlockingIOError:
                    continue
                if what == "output" and data:
                    container.log.add(data)
                    continue
                if what == "news" and data:
                    pending += data
                    while b"\n" in pending:
                        line, _, rest = bytes(pending).partition(b"\n")
                        pending[:] = rest
                        if self._learn(container, json.loads(line)):
                            on_news()
                    continue
                with self._lock:
                    self._selector.unregister(key.fd)
                os.close(key.fd)
                done = open_ends.pop(id(container), 0) + 1
                if done < 2:
                    open_ends[id(container)] = done
                    continue
                # Report an exit only after all output was read.
                if container.exit is None and container.error is None:
                    container.exit, container.signal = 137, int(signal.SIGKILL)
                container.ended_at = time.time()
                container.log.close()
                on_news()

    @staticmethod
    def _learn(container: Container, news: dict[str, int | str]) -> bool:
        if "pid" in news:
            container.started_at = time.time()
            container.pid = int(news["pid"])
        elif "error" in news:
            container.error = str(news["error"])
        else:
            container.signal = int(news["signal"])
            container.exit = int(news["exit"])
            return False  # The end is reported once the output is complete.
        return True
