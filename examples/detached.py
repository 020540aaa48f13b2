"""Start a job, and attach to it from another process by its id.

    python examples/detached.py

A job keeps running when the script that started it ends. `kinetic jobs list` shows it, and
`kinetic.attach` returns its handle.
"""

import subprocess
import sys

import kinetic


@kinetic.run(accelerator="cpu")
def count_to(n):
    for i in range(1, n + 1):
        print(f"counted to {i}", flush=True)
    return n


def start():
    job = count_to.run_async(3)
    print(f"started {job.job_id}")
    return job.job_id


def print_result(job_id):
    job = kinetic.attach(job_id)
    result = job.result(stream_logs=False)
    print(f"{job.job_id} is {job.status()}, its value is {result}; it printed:")
    print(job.logs(), end="")


def main():
    if len(sys.argv) > 1:
        print_result(sys.argv[1])
        return
    job_id = start()
    sys.stdout.flush()
    # A process that has only the id.
    subprocess.run([sys.executable, __file__, job_id], check=True)


if __name__ == "__main__":
    main()
