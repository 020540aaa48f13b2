"""Calls of a remote store to send this repository and to start a host; requests of a bucket for
submissions, the start of 64 hosts, and lists of jobs.

In: nothing (or the delay of a call in milliseconds). Out: two tables on stdout.

    python benchmarks/store_calls.py [DELAY_MS]

The store is in memory, counts its calls, and delays each of them like a bucket. Many calls may run
at once, so the floor of all times is the delay of one call. The bucket is the tests' double of
Cloud Storage, which logs its requests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

from measure import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from doubles.memory_store import MemoryStore

from kinetic._backends import registry
from kinetic._client import planning, submission
from kinetic._config import settings as configuration
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.exits import Exit
from kinetic._core.options import Options
from kinetic._core.outcome import HostReport, judge
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._host.agent import workspace
from kinetic._host.identity import Identity
from kinetic._source import bundle
from kinetic._source.download import unpack
from kinetic._source.upload import upload
from kinetic._store import index
from kinetic._store.base import Store
from kinetic._store.many import at_once
from kinetic._store.open import open_store
from kinetic.cli.root import call

DELAY_MS = 30.0
EDITS = 30
JOBS = 1000
HOSTS = 64


def main(delay_ms: float = DELAY_MS) -> None:
    with tempfile.TemporaryDirectory(prefix="kn-bench-") as folder:
        place = Path(folder).resolve()
        store = MemoryStore(delay_s=delay_ms / 1000)
        # A copy, because files in it are changed below.
        project = place / ROOT.name
        subprocess.run(["git", "clone", "-q", ROOT, project], check=True)
        (project / ".kineticignore").unlink()  # Send all files.
        original = bundle.build(project, cache_dir=place / "cache")

        def build() -> bundle.Bundle:
            return bundle.build(project, cache_dir=place / "cache")

        def edit(number: int) -> bundle.Bundle:
            files = [name for name, _ in original.files() if name.endswith(".py")]
            with open(project / files[number * 7 % len(files)], "a") as file:
                file.write(f"# {number}\n")
            return build()

        def send(made: bundle.Bundle) -> Callable[[], str]:
            def act() -> str:
                sent = upload(made, store)
                return f"{sent.size_bytes + sent.lists_bytes:,} bytes"

            return act

        def start(made: bundle.Bundle, name: str) -> Callable[[], str]:
            def act() -> str:
                return f"{len(unpack(store, made.tree, place / name)):,} files and folders"

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
            upload(edit(number), store)
        made = edit(EDITS)
        row(f"one file changed, the {EDITS}th time", send(made), "<= 6 calls")
        row("start of a host after that", start(made, "last"), "<= 10 calls")
        # Substitute a backend that accepts any store.
        with registry.substitute_backend("ray", lambda _place, _store: Nowhere()):
            in_a_bucket(project, place)


class Nowhere:
    """A backend that creates nothing."""

    def render(self, plan: Plan) -> list[dict[str, object]]:
        return []

    preflight = submit = cleanup = lambda *_: None


def in_a_bucket(project: Path, place: Path) -> None:
    try:
        from doubles.gcs import serving
    except ImportError as missing:
        print(f"\nNo bucket: {missing}")
        return
    function = _in_project(project)
    with serving("bucket") as double:
        os.environ["STORAGE_EMULATOR_HOST"] = double.uri
        os.environ["KINETIC_STORE"] = "gs://bucket"
        print(f"\nThe same and a bucket\n{'':32}{'requests':>9}   by kind")
        store = open_store("gs://bucket")

        def row(name: str, act: Callable[[], object]) -> None:
            double.forget_requests()
            act()
            calls = double.calls()
            kinds = ", ".join(f"{count} {call}" for call, count in calls.most_common())
            print(f"{name:32}{calls.total():9}   {kinds}")

        def submitted(path: str = "") -> Plan:
            if path:
                (project / path).write_text(f"{path}\n")
            options = Options(topology=resolve("cpu"))
            made = planning.plan_call(
                function, (), {}, options, settings=configuration.load(), place=Place("ray")
            )
            submission.submit(made, Nowhere(), store)  # type: ignore[arg-type]
            return made.plan

        row("first submission", submitted)
        row("unchanged", submitted)
        row("one file changed", lambda: submitted("changed.py"))
        plan = submitted()

        def start() -> None:
            (place / "start").mkdir()  # A host creates nothing above its own folder.
            for host in range(HOSTS):
                who = Identity("", plan.job_id, host, HOSTS, "", "", "", str(place / "start"))
                own = open_store("gs://bucket")  # Each host has its own connections.
                workspace.prepare(who, Plan.from_json(json.loads(own.get(plan_key(plan)))), own)
                workspace.remove(place / "start" / f"host-{host}")

        row(f"start of {HOSTS} hosts", start)
        fill(open_store("gs://bucket/many"))
        os.environ["KINETIC_STORE"] = "gs://bucket/many"
        row(f"jobs list, {JOBS:,} jobs", lambda: run_command("jobs", "list", "-n", "20"))
        row("jobs status of one", lambda: run_command("jobs", "status", "job-00000007"))
        row("jobs prune --dry-run", lambda: run_command("jobs", "prune", "--dry-run"))
        row(f"jobs prune of {JOBS:,} jobs", lambda: run_command("jobs", "prune", "--yes"))


def plan_key(plan: Plan) -> str:
    return layout.JobKeys(plan.job_id).plan


def _in_project(project: Path) -> Callable[[], None]:
    """Return a function of a module in the copy of this repository."""
    path = project / "benchmarks" / "in_project.py"
    path.write_text("def function():\n    pass\n")
    module = types.ModuleType("in_project")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    sys.modules["in_project"] = module
    return module.function


def fill(store: Store) -> None:
    def add(n: int) -> None:
        place, created_at = Place("ray"), 1_700_000_000.0 + n
        ref = JobRef(f"job-{n:08x}", place, "cpu:8", "f", "train.f", created_at, store.uri)
        report = HostReport(0, Exit.RETURNED, started_at=created_at + 1, result_digest="0" * 64)
        index.add(store, ref)
        store.put(layout.JobKeys(ref.job_id).plan, b"{}")
        index.write_outcome(store, ref.job_id, judge(1, [report], now=created_at + 60))

    at_once(add, range(JOBS), store.calls_at_once)


def run_command(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        assert call([*words]) == 0, out.getvalue()
    return out.getvalue()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
