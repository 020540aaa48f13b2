"""Run the whole suite many times, and list each test that failed in any run.

Prints a line per run, then each test that failed, with its runs and its output. The reports of all
runs are below build/test-repeat.

Every second run shares the machine with two processes that compute all the time: a test that fails
only in these runs is as wrong as a test that always fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path("build/test-repeat")
"""The folder of reports, below the repository's root, which is the working directory."""
BUSY_LOOPS = 2
TESTS_FAILED = 1
"""pytest's exit code if tests failed. Larger codes mean that it could not run the tests."""


@dataclass(frozen=True)
class Failure:
    """One test that failed in one run."""

    test: str
    run: str
    output: str


@dataclass(frozen=True)
class Run:
    """One run of the suite."""

    name: str
    exit_code: int
    tests: int
    took_s: float
    failures: tuple[Failure, ...]

    @property
    def is_green(self) -> bool:
        """True if the run had tests, and all of them passed."""
        return self.exit_code == 0 and self.tests > 0


@contextlib.contextmanager
def keep_busy(loops: int) -> Iterator[None]:
    """Start processes that compute until the context ends, or this process dies."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    spin = [sys.executable, "-c", program]
    processes = [subprocess.Popen(spin) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_report(path: Path, run: str) -> tuple[int, tuple[Failure, ...]]:
    """Return the number of tests in a run's JUnit report, and its failures; (0, ()) if the report
    is missing or cut off."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return 0, ()
    failures = [
        Failure(
            f"{case.get('classname', '')}::{case.get('name', '')}",
            run,
            "\n".join(filter(None, [wrong.get("message"), wrong.text])),
        )
        for case in cases
        for wrong in [*case.findall("failure"), *case.findall("error")]
    ]
    return len(cases), tuple(failures)


def run_suite(number: int, *, is_busy: bool, arguments: list[str]) -> Run:
    """Run the suite once, with its output in a separate file."""
    name = f"{number}-busy" if is_busy else f"{number}-alone"
    report = FOLDER / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
    begun = time.monotonic()
    with (
        (FOLDER / f"{name}.txt").open("w") as output,
        keep_busy(BUSY_LOOPS if is_busy else 0),
    ):
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    took_s = time.monotonic() - begun
    tests, failures = read_report(report, name)
    return Run(name, done.returncode, tests, took_s, failures)


def describe_run(run: Run) -> str:
    """Return the line about one run."""
    verdict = "green" if run.is_green else f"{len(run.failures)} failed"
    if run.exit_code > TESTS_FAILED or not run.tests:
        verdict = f"pytest ended with {run.exit_code}: see {FOLDER}/{run.name}.txt"
    return f"run {run.name}: {verdict}; {run.tests} tests in {run.took_s:.0f} s"


def describe_failures(runs: list[Run]) -> str:
    """Return each test that ever failed, the most frequent first, with the output of one run."""
    by_test: dict[str, list[Failure]] = {}
    for failure in (each for run in runs for each in run.failures):
        by_test.setdefault(failure.test, []).append(failure)
    ordered = sorted(by_test.items(), key=lambda entry: -len(entry[1]))
    return "\n".join(
        f"\n{test}: failed in {len(failures)} of {len(runs)} runs "
        f"({', '.join(each.run for each in failures)})\n{failures[0].output}"
        for test, failures in ordered
    )


def main() -> int:
    """Run the suite several times, and return 0 if every run was green."""
    parser = argparse.ArgumentParser(description="Run the suite N times, every second time busy.")
    parser.add_argument("times", type=int, help="number of runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="pytest's arguments")
    options = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    runs: list[Run] = []
    for number in range(1, options.times + 1):
        is_busy = number % 2 == 0
        runs.append(run_suite(number, is_busy=is_busy, arguments=options.arguments))
        print(describe_run(runs[-1]), flush=True)
    green = sum(run.is_green for run in runs)
    print(describe_failures(runs), flush=True)
    print(f"{green} of {len(runs)} runs were green")
    return 0 if runs and green == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
