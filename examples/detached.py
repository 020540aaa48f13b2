"""Start a job, detach from it, and find it again from another process by its id.

    python examples/detached.py

A job does not need its caller: it keeps running when the script ends. `kinetic jobs list` shows it,
and `kinetic.attach` finds it again.
"""

import subprocess
import sys

import kinetic


@kinetic.run(accelerator="cpu")
def count_to(n):
    for i in range(1, n + 1):
        print(f"counted to {i}", flush=True)
    return n


def start_and_leave():
    job = count_to.run_async(3)
    print(f"started {job.job_id}")
    return job.job_id


def take_up(job_id):
    job = kinetic.attach(job_id)
    result = job.result(stream_logs=False)
    print(f"{job.job_id} is {job.status()}, its value is {result}; it printed:")
    print(job.logs(), end="")


def main():
    if len(sys.argv) > 1:
        take_up(sys.argv[1])
        return
    job_id = start_and_leave()
    sys.stdout.flush()
    # a process that knows only the id
    subprocess.run([sys.executable, __file__, job_id], check=True)


if __name__ == "__main__":
    main()
