"""A process that follows jobs forks a child: the child, too, can use the cluster."""

from __future__ import annotations

import subprocess
import sys

from doubles.cluster.fake import FakeCluster

PROGRAM = """
import os, sys, time
from kinetic._backends.kubernetes import kubeconfig, names
from kinetic._backends.kubernetes.connection import share_connection
from kinetic._backends.kubernetes.resources import JOBS
from kinetic._backends.kubernetes.snapshot import share_reader
from kinetic._core.place import Place
from kinetic._core.ref import JobRef

refs = [JobRef(f"job-{n}", Place("gke"), "x", "f", "f", 0.0, "", hosts=1) for n in (1, 2)]
variables = {"KUBECONFIG": sys.argv[1], "PATH": os.defpath}
api = share_connection(kubeconfig.find(variables), variables, namespace="default")
reader = share_reader(api)

def create(ref):
    container = {"name": "kinetic", "image": "x"}
    api.create(JOBS, {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": names.workload_of(ref.job_id), "labels": names.labels_of(ref.job_id)},
        "spec": {"suspend": True, "template": {"spec": {"containers": [container],
                                                        "restartPolicy": "Never"}}},
    })

def read_until(is_so):
    until = time.monotonic() + 100
    while not is_so(reader.read(refs)) and time.monotonic() < until:
        time.sleep(0.05)
    return is_so(reader.read(refs))

create(refs[0])
assert reader.read(refs).workload(refs[0])
os.register_at_fork(before=reader._lock.acquire)  # As if a thread listed at this moment.
child = os.fork()
if not child:
    create(refs[1])
    print("seen", bool(read_until(lambda seen: seen.workload(refs[1]))), flush=True)
    os._exit(0)
reader._lock.release()
os.waitpid(child, 0)
print("parent", bool(read_until(lambda seen: seen.workload(refs[1]))), flush=True)
os._exit(0)
"""


def test_the_child_of_a_process_that_follows_jobs_sees_what_happens(cluster: FakeCluster) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(cluster.kubeconfig)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.stderr == ""
    assert ran.stdout.split("\n") == ["seen True", "parent True", ""]
