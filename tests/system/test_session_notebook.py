"""A notebook that develops a training step on a session, cell by cell."""

from __future__ import annotations

import os
import signal
import threading

import nbclient
import nbformat
import pytest
from gangs import wait_until
from kernels import PATIENCE_S, ROOT

from kinetic._client.sessions import open_handle
from kinetic._store import index
from kinetic._store.local import LocalStore

# Jupyter's packages warn of things that this project cannot fix.
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

START = """%colors nocolor
import os, kinetic, rule
session = kinetic.session("cpu", name="dev", idle_timeout="3m", keep=True)
os.getpid()"""
DEFINE = """
class Diverged(Exception):
    pass

@kinetic.run("cpu")
def train(steps, limit=1e9, waits=False):
    import time
    kept = kinetic.kept
    if not hasattr(kept, "weights"):
        print("new weights")
        kept.weights, kept.steps = [8.0, -8.0], 0
    for _ in range(steps):
        kept.weights = [rule.update(weight) for weight in kept.weights]
        kept.steps += 1
        if max(kept.weights) > limit:
            raise Diverged(kept.steps)
        if waits:
            print("one step done", flush=True)
            time.sleep(1000)
    return kept.steps, max(kept.weights)

@kinetic.run("cpu")
def read_weights():
    return kinetic.kept.weights"""
GO_ON = """handle = kinetic.list_jobs()[0]
handle.cancel()
try:
    handle.result()
except kinetic.errors.JobCancelled:
    print("cancelled")
train(1)"""


class Notebook:
    """A notebook whose cells run as they are written."""

    def __init__(self, client):
        self._client = client
        self._cells = client.nb.cells

    def run(self, source, *, fails=False):
        """Run a new cell; return its value, its output and its error as texts."""
        cell = nbformat.v4.new_code_cell(source)
        cell.metadata.tags = ["raises-exception"] if fails else []
        self._cells.append(cell)
        self._client.execute_cell(cell, len(self._cells) - 1)
        value = output = error = ""
        for part in cell.outputs:
            if part.output_type == "execute_result":
                value = part.data["text/plain"]
            elif part.output_type == "stream":
                output += part.text
            elif part.output_type == "error":
                error = "\n".join(part.traceback)
        return value, output, error

    def interrupt_after(self, pid, text):
        """Interrupt the kernel once its newest cell shows `text`: its caller follows the job."""

        def shows():
            streams = [each for each in self._cells[-1].outputs if each.output_type == "stream"]
            return any(text in each.text for each in streams)

        wait_until(shows, f"the cell does not show {text!r}")
        os.kill(pid, signal.SIGINT)


@pytest.fixture
def notebook(home):
    folder = home.parent / "notebook"
    folder.mkdir(parents=True)
    (folder / "rule.py").write_text("def update(weight):\n    return weight / 2\n")
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=int(PATIENCE_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(home.parent / "ipython")}
    try:
        with client.setup_kernel(env=environ):
            yield Notebook(client)
    finally:
        store = LocalStore(home)
        for session in [open_handle(r, store) for r in index.list_refs(store) if r.session_name]:
            session.stop(force=True)
            wait_until(lambda session=session: has_ended(session), f"{session} has not ended")


def has_ended(session):
    return session.status().state not in ("PENDING", "RUNNING")


def test_a_notebook_develops_a_step_on_one_session(notebook, home):
    """Weights stay while a module changes, a call raises an exception, and a cell is
    interrupted."""
    pid = int(notebook.run(START)[0])
    assert "calls run on the session dev." in notebook.run("%kinetic session dev")[1]
    notebook.run(DEFINE)
    value, output, _ = notebook.run("train(2)")
    assert (value, "new weights" in output) == ("(2, 2.0)", True)
    assert notebook.run("read_weights()")[0] == "[2.0, -2.0]"

    changed = "%%writefile rule.py\ndef update(weight):\n    return weight * 10\n"
    notebook.run(changed)
    value, output, _ = notebook.run("train(1)")
    assert value == "(3, 20.0)"
    assert "imported again, because their files have changed: rule" in output

    *_, error = notebook.run("train(9, limit=1000)", fails=True)
    assert error.splitlines()[-1].startswith("More: "), error
    assert "Diverged: 5" in error
    assert notebook.run("read_weights()")[0] == "[2000.0, -2000.0]"

    thread = threading.Thread(target=notebook.interrupt_after, args=(pid, "one step done"))
    thread.start()
    *_, error = notebook.run("train(9, waits=True)", fails=True)
    thread.join()
    assert "KeyboardInterrupt" in error
    assert "kinetic jobs cancel job-" in error
    value, output, _ = notebook.run(GO_ON)
    assert (value, "cancelled\n" in output) == ("(7, 200000.0)", True)

    assert "no session is in use" in notebook.run("%kinetic session off")[1]
    notebook.run("session.stop()")
