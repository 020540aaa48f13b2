"""A batch of inputs that do nothing, compared with submitit's local executor and joblib's process
pool.

In: how many inputs (1,000 by default). Out: rows of text. Called by hand and by run.py.

joblib runs all inputs in two processes. A job of kinetic has separate processes and a log, its
records outlive the caller, and its death affects no other job. The same is true for submitit's
jobs, so submitit is the floor: the time to compare with.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import measure

import kinetic

AT_A_TIME = 16
FEW = 60
"""Number of inputs for submitit, which starts an interpreter for each job: enough to time one."""


def nothing(x):
    return x


def ours(inputs: int, at_a_time: int = AT_A_TIME) -> None:
    batch = kinetic.run(accelerator="cpu")(nothing).run_async_map(
        range(inputs), max_concurrent=at_a_time
    )
    assert batch.results(progress=False) == list(range(inputs)), "a child was lost"


def with_submitit(inputs: int) -> None:
    """Run as many jobs at a time as there are processors; the local executor itself has no
    limit."""
    import submitit

    with tempfile.TemporaryDirectory() as folder:
        executor = submitit.LocalExecutor(folder=folder)
        executor.update_parameters(timeout_min=5)
        waiting, running, done = list(range(inputs)), [], []
        while waiting or running:
            while waiting and len(running) < 2 * (os.cpu_count() or 1):
                running.append(executor.submit(nothing, waiting.pop()))
            ended = [job for job in running if job.done()]
            done += [job.result() for job in ended]
            running = [job for job in running if job not in ended]
            time.sleep(0.002)
        assert sorted(done) == list(range(inputs))


def with_joblib(inputs: int) -> None:
    import joblib

    assert joblib.Parallel(n_jobs=2)(joblib.delayed(nothing)(x) for x in range(inputs)) == list(
        range(inputs)
    )


def time_per_input(act: Callable[[int], None], inputs: int) -> float:
    """Return the seconds per input."""
    return measure.seconds(lambda: act(inputs)) / inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="?", type=int, default=1000)
    inputs = parser.parse_args().inputs
    with measure.home():
        ours(2)
        few = min(FEW, inputs)
        submitit_s = time_per_input(with_submitit, few)
        many_s = time_per_input(ours, inputs)
        submitit_after_s = time_per_input(with_submitit, few)
        joblib_s = time_per_input(with_joblib, inputs)
        floor_s = min(submitit_s, submitit_after_s)
        measure.heading(
            f"{inputs} no-op inputs on cpu, per input (floor: submitit's LocalExecutor)"
        )
        measure.row(f"a batch, {AT_A_TIME} jobs at a time", many_s, floor_s, "<= 1x")
        measure.row("joblib, 2 workers, no job of its own", joblib_s, floor_s)
        print(
            f"  {'inputs per second':42}{1 / many_s:9.1f}   {1 / floor_s:9.1f} (submitit) "
            f"{1 / joblib_s:9.1f} (joblib)"
        )


if __name__ == "__main__":
    main()
