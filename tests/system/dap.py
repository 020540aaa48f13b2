"""A minimal debugger client: it speaks the Debug Adapter Protocol with debugpy over a socket, as an
editor does."""

from __future__ import annotations

import json
import socket
from typing import Any

PATIENCE_S = 200.0


class Editor:
    """An editor's debugging session: attach, set breakpoints, read variables, detach."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._file = self._socket.makefile("rb")
        self._sent = 0
        self._messages: list[dict[str, Any]] = []

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        self._sent += 1
        body = json.dumps(
            {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        ).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        return self._sent

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.answer(self.send(command, **arguments))

    def answer(self, number: int) -> dict[str, Any]:
        response = self._next(lambda m: m["type"] == "response" and m["request_seq"] == number)
        assert response["success"], response
        return response.get("body") or {}

    def event(self, name: str) -> dict[str, Any]:
        return self._next(lambda m: m["type"] == "event" and m["event"] == name).get("body") or {}

    def attach(
        self, configuration: dict[str, Any], breakpoints: dict[str, list[int]]
    ) -> dict[str, list[bool]]:
        """Attach with a launch configuration, and set breakpoints (line numbers by file). Return
        for each file whether debugpy has verified each breakpoint."""
        self.ask(
            "initialize", adapterID="test", clientID="test", linesStartAt1=True, pathFormat="path"
        )
        attach = self.send("attach", **configuration)
        self.event("initialized")
        verified = {}
        for file, lines in breakpoints.items():
            body = self.ask(
                "setBreakpoints",
                source={"path": file},
                breakpoints=[{"line": line} for line in lines],
            )
            verified[file] = [b["verified"] for b in body["breakpoints"]]
        self.ask("configurationDone")
        self.answer(attach)
        return verified

    def wait_for_stop(self) -> tuple[int, list[dict[str, Any]]]:
        """Wait until a thread stops; return its id and its frames, innermost first."""
        thread = self.event("stopped")["threadId"]
        return thread, self.ask("stackTrace", threadId=thread)["stackFrames"]

    def value(self, expression: str, frame: dict[str, Any]) -> str:
        return self.ask("evaluate", expression=expression, frameId=frame["id"], context="repl")[
            "result"
        ]

    def _next(self, wanted: Any) -> dict[str, Any]:
        for at, message in enumerate(self._messages):
            if wanted(message):
                return self._messages.pop(at)
        while True:
            message = self._read()
            if wanted(message):
                return message
            self._messages.append(message)

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the debug adapter has hung up"
        return json.loads(self._file.read(length))
