"""A worker that may stay: how its function is interrupted, and what must not happen twice.

In: a process of its own, whose main thread waits. Out: what it prints.
"""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import os, signal, sys, time
from types import SimpleNamespace

from kinetic._host.worker import signals, staying

ask, tell = os.pipe()
freedom = staying.Unblocker(ask)
freedom.listen()
start = SimpleNamespace(attempt=1, world=SimpleNamespace(address=""))


def free():
    os.write(tell, (1).to_bytes(staying.ATTEMPT_BYTES))
"""


def run(code, *args):
    command = [sys.executable, "-c", f"{BEGIN}{code}\nsys.stdout.flush()\nos._exit(0)", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_function_that_sleeps_is_interrupted_though_the_first_signal_did_not_wake_it():
    """No signal is sent by anybody else, as if it had come just before the sleep; another thread
    waits for what the function does last, which takes longer than the signals are apart."""
    code = """
signals.reset()
freedom.begin(start)
free()
try:
    time.sleep(600)
except BaseException as error:
    time.sleep(0.5)
    print(type(error).__name__)
freedom.end()
"""
    assert run(code) == "Terminated\n"


def test_a_handler_of_the_function_is_not_called_again_and_again():
    code = """
signals.reset()
freedom.begin(start)
calls = []
signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
free()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
print(len(calls))
"""
    assert run(code) == "1\n"


def test_a_process_that_was_interrupted_in_an_import_cannot_stay(tmp_path):
    (tmp_path / "half.py").write_text("import other")
    (tmp_path / "other.py").write_text("import os; os.kill(os.getpid(), 15)")
    code = """
sys.path.insert(0, sys.argv[1])
signals.reset()
freedom.begin(start)
try:
    import half
except signals.Terminated:
    freedom.end()
try:
    staying.leave(staying.RetainedCall((print, (), {})))
except staying.CannotStay as why:
    print(why)
"""
    assert run(code, str(tmp_path)) == "the import of half was interrupted\n"


def test_a_process_that_was_interrupted_elsewhere_can():
    code = """
signals.reset()
freedom.begin(start)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except signals.Terminated:
    freedom.end()
staying.leave(staying.RetainedCall((print, (), {})))
print("stays")
"""
    assert run(code) == "stays\n"
