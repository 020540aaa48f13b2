"""Calls on a held slice, compared with a gRPC call and with the same calls on a slice of their own.

The kept call that does nothing has all its records (plan, reference, events, report, outcome), but
no JAX; the plain one joins the hosts in JAX and runs a collective.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import measure
from calls import FIRST_PSUM

import kinetic

RUNS = 25
HOSTS = 4
FILES = 2000


@contextmanager
def grpc_call() -> Iterator[Callable[[], object]]:
    """Serve a gRPC method that returns its bytes on a Unix socket; yield a call of it."""
    with tempfile.TemporaryDirectory() as folder:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        echo = grpc.unary_unary_rpc_method_handler(lambda data, context: data)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("e", {"E": echo}),))
        server.add_insecure_port(f"unix:{folder}/socket")
        server.start()
        with grpc.insecure_channel(f"unix:{folder}/socket") as channel:
            method = channel.unary_unary("/e/E")
            yield lambda: method(b"1")
        server.stop(None)


def do_nothing() -> int:
    """Return a constant."""
    return 1


def first_psum() -> None:
    """Join the hosts in JAX, and run a collective."""
    exec(FIRST_PSUM, {})


def median_s(act: Callable[[], object], runs: int = RUNS, skipped: int = 3) -> float:
    """Return the median of several calls, without the first ones."""
    return statistics.median([measure.seconds(act) for _ in range(runs + skipped)][skipped:])


def change_a_file(folder: Path) -> Callable[[], object]:
    """Return a function that writes another number into one module of many."""
    numbers = iter(range(1, 1 << 30))
    return lambda: (folder / "part7.py").write_text(f"NUMBER = {next(numbers)}\n")


def main() -> None:
    measure.heading("sessions: calls on held slices")
    with measure.home(), grpc_call() as floor:
        floor_s = median_s(floor, 200)
        with kinetic.session("cpu:1", slices=HOSTS, name="bench") as session:
            session.wait_until_ready()
            kept = kinetic.run("cpu:1", slices=HOSTS, keep=True)(do_nothing)
            kept_s = median_s(kept)
            measure.row(f"nothing, kept, {HOSTS} hosts: gRPC call", kept_s, floor_s, "<= 3x")
            session.stop()
        shape = f"cpu:{HOSTS}"
        own = kinetic.run(shape, slices=HOSTS)(first_psum)
        own_s = median_s(own, 5, 2)
        with kinetic.session(shape, slices=HOSTS, name="psum") as session:
            session.wait_until_ready()
            plain_s = median_s(kinetic.run(shape, slices=HOSTS)(first_psum), 7, 2)
            measure.row(
                f"first collective, {HOSTS} hosts x {HOSTS}: warm call", plain_s, own_s, "<= 0.5x"
            )
            again = kinetic.run(shape, slices=HOSTS, keep=True)(first_psum)
            measure.row("the same, kept: warm call", median_s(again, 7, 2), own_s)
            session.stop()


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"  in {time.monotonic() - began:.0f} s")
