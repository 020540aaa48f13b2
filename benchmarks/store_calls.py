"""How many calls of a distant store it takes to send this repository, to start a host, and to list
jobs.

In: nothing (or the delay of a call in milliseconds). Out: a table on stdout.

    python benchmarks/store_calls.py [DELAY_MS]

The store is in memory, counts its calls, and lets each take as long as one to a bucket does. Many
calls may be on their way at once, so the floor of all times is the delay of one.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import ROOT

from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, judge
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._source import bundle
from kinetic._store import index
from kinetic._store.memory import MemoryStore
from kinetic.cli.root import call

DELAY_MS = 30.0
EDITS = 30
JOBS = 1000


def main(delay_ms: float = DELAY_MS) -> None:
    with tempfile.TemporaryDirectory(prefix="kn-bench-") as folder:
        place = Path(folder).resolve()
        store = MemoryStore(delay_s=delay_ms / 1000)
        # A copy, to be changed below.
        project = place / ROOT.name
        original, near = bundle.build(ROOT, cache_dir=place / "cache"), MemoryStore()
        bundle.upload(original, near)
        bundle.unpack(near, original.tree, project)

        def build() -> bundle.Bundle:
            return bundle.build(project, cache_dir=place / "cache")

        def edit(number: int) -> bundle.Bundle:
            files = [name for name, _ in original.files() if name.endswith(".py")]
            with open(project / files[number * 7 % len(files)], "a") as file:
                file.write(f"# {number}\n")
            return build()

        def send(made: bundle.Bundle) -> Callable[[], str]:
            def act() -> str:
                sent = bundle.upload(made, store)
                return f"{sent.size_bytes + sent.lists_bytes:,} bytes"

            return act

        def start(made: bundle.Bundle, name: str) -> Callable[[], str]:
            def act() -> str:
                return f"{len(bundle.unpack(store, made.tree, place / name)):,} files and folders"

            return act

        print(
            f"\nThis repository ({original.tree.files} files, {original.tree.size_bytes:,} bytes) "
            f"and a store that takes {delay_ms:g} ms a call\n"
            f"{'':32}{'calls':>8}{'ms':>10}{'x a call':>10}   goal"
        )

        def row(name: str, act: Callable[[], str], goal: str) -> None:
            store.forget_calls()
            began = time.perf_counter()
            summary = act()
            took_ms = 1000 * (time.perf_counter() - began)
            calls = store.calls.total()
            print(
                f"{name:32}{calls:8}{took_ms:10.1f}{took_ms / delay_ms:10.1f}   {goal}; {summary}"
            )

        made = build()
        row("first submission", send(made), "<= 40 calls, <= 1 s")
        row("unchanged", send(made), "1 call")
        row("start of a host", start(made, "first"), "<= 10 calls")
        row("one file changed", send(edit(0)), "<= 6 calls")
        for number in range(1, EDITS):
            bundle.upload(edit(number), store)
        made = edit(EDITS)
        row(f"one file changed, the {EDITS}th time", send(made), "<= 6 calls")
        row("start of a host after that", start(made, "last"), "<= 10 calls")
        store = with_jobs(delay_ms)
        row(f"jobs list, {JOBS:,} jobs", listed(store), "<= 3 calls")


def with_jobs(delay_ms: float) -> MemoryStore:
    near, distant = MemoryStore("jobs"), MemoryStore("jobs", delay_s=delay_ms / 1000)
    for n in range(JOBS):
        place, created_at = Place("local", stands_in_for="gke"), 1_700_000_000.0 + n
        ref = JobRef(f"job-{n:08x}", place, "cpu:8", "f", "train.f", created_at, near.uri)
        report = HostReport(0, Exit.RETURNED, started_at=created_at + 1, result_digest="0" * 64)
        index.add(near, ref)
        index.write_outcome(near, ref.job_id, judge(1, [report], now=created_at + 60))
    return distant


def listed(store: MemoryStore) -> Callable[[], str]:
    os.environ["KINETIC_STORE"] = store.uri

    def act() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            assert call(["jobs", "list", "-n", "20"]) == 0
        return f"{out.getvalue().count('SUCCEEDED')} shown"

    return act


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
