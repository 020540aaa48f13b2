"""A Jupyter kernel, driven as a notebook drives it."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 200.0


class Kernel:
    """A notebook without a page: runs cells in a kernel, and collects the kernel's messages."""

    def __init__(self, folder, path=()):
        """Start a kernel in the folder. Its PYTHONPATH is `path`, then this project."""
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(
            cwd=str(folder),
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))),
                "IPYTHONDIR": str(folder.parent / "ipython"),
            },
        )
        self.client = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def close(self):
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def interrupt(self):
        self._manager.interrupt_kernel()

    def start(self, cell):
        """Run a cell; yield the kernel's messages as they arrive, until the cell has ended."""
        number = self.client.execute(cell)
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            yield kind, content

    def run(self, cell):
        return CellOutput(self.start(cell))


class CellOutput:
    """The kernel's messages about one cell."""

    def __init__(self, messages):
        self.messages = list(messages)

    def stream(self, name):
        return "".join(
            c["text"] for kind, c in self.messages if kind == "stream" and c["name"] == name
        )

    @property
    def error(self):
        return "\n".join("\n".join(c["traceback"]) for kind, c in self.messages if kind == "error")

    @property
    def value(self):
        assert not self.error, self.error
        return next((c["data"] for kind, c in self.messages if kind == "execute_result"), {})
