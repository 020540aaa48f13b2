"""Throughput and latency of following a job's output, compared with a bare pipe of the same
bytes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import measure

import kinetic
from kinetic._backends.base import LogRequest

TOTAL_BYTES = 1 << 30
LINES = 100


def flood(total: int) -> int:
    """Print `total` bytes in lines of 100."""
    block = (b"x" * 99 + b"\n") * 10_000
    for _ in range(total // len(block)):
        os.write(1, block)
    return total // len(block) * len(block)


def by_pipe(total: int) -> float:
    source = (
        "import os\nblock = (b'x' * 99 + b'\\n') * 10_000\n"
        f"for _ in range({total} // len(block)): os.write(1, block)"
    )
    begun = time.perf_counter()
    with (
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as child,
        open(os.devnull, "wb") as sink,
    ):
        while data := os.read(child.stdout.fileno(), 1 << 20):
            sink.write(data)
    return time.perf_counter() - begun


def by_following(total: int) -> tuple[float, int]:
    handle = kinetic.run(accelerator="cpu")(flood).run_async(total)
    begun, received_bytes = time.perf_counter(), 0
    for chunk in handle.chunks(LogRequest()):
        received_bytes += len(chunk.data) if chunk else 0
    taken = time.perf_counter() - begun
    assert received_bytes == handle.result(), "output was lost"
    return taken, received_bytes


def ticker(lines: int) -> None:
    for _ in range(lines):
        print(repr(time.time()), flush=True)
        time.sleep(0.02)


def latencies() -> list[float]:
    handle = kinetic.run(accelerator="cpu")(ticker).run_async(LINES)
    delays = []
    for chunk in handle.chunks(LogRequest()):
        now = time.time()
        delays += [now - float(line) for line in (chunk.data.split() if chunk else ())]
    return delays


def main() -> None:
    with measure.home():
        kinetic.run(accelerator="cpu")(int)()
        floor_s = statistics.median(by_pipe(TOTAL_BYTES) for _ in range(3))
        taken_s, received_bytes = by_following(TOTAL_BYTES)
        measure.heading("following 1 GiB of output (floor: a bare pipe)")
        measure.row(
            f"{received_bytes / taken_s / 1e6:.0f} MB/s, nothing lost",
            taken_s,
            floor_s,
            ">= 100 MB/s",
        )
        delays = sorted(latencies())
        print(
            f"\nfrom print to follower, {len(delays)} lines: "
            f"median {delays[len(delays) // 2] * 1e3:.1f} ms, "
            f"99th percentile {delays[int(len(delays) * 0.99)] * 1e3:.1f} ms (goal <= 200 ms)"
        )


if __name__ == "__main__":
    main()
