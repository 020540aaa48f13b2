"""The backends with which the tests of the contract run, and jobs. Add new ones to `BACKENDS`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from doubles.cluster.fake import FakeCluster
from doubles.cluster.nodes import CPU_POOL, V6E_4X4

from kinetic._backends.base import LogRequest, phase_of
from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.backend import KubernetesBackend
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._backends.local.backend import LocalBackend
from kinetic._backends.session import SessionBackend
from kinetic._config.settings import worker_environ
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.log_format import STDOUT
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan
from kinetic._core.ref import JobRef, new_job_id
from kinetic._core.session import Session
from kinetic._core.state import JobStatus
from kinetic._pickling import call
from kinetic._pickling.modules import Shipped
from kinetic._store.local import LocalStore


def local(store, **options):
    return LocalBackend(store, worker_environ(), **options)


@contextmanager
def folder(path):
    yield LocalStore(path)


CLUSTERS: dict[str, FakeCluster] = {}
"""The cluster whose pods use a store, by the store's address."""


@contextmanager
def beside_cluster(path):
    """Open a store in a folder that the pods of a new cluster can also reach."""
    with FakeCluster([CPU_POOL, V6E_4X4]) as cluster:
        store = LocalStore(path)
        CLUSTERS[store.uri] = cluster
        yield store
        del CLUSTERS[store.uri]
    assert cluster.crashes == []


def kubernetes(store):
    cluster = CLUSTERS[store.uri]
    pods = PodSettings("python:3-slim", f"file://{store.uri}", sys.executable, simulated=True)
    variables = {"KUBECONFIG": str(cluster.kubeconfig)}
    access = kubeconfig.find(variables)
    return KubernetesBackend("gke", store, pods, lambda: HttpApi(access, variables))


SESSIONS: dict[str, str] = {}
"""Ids of the sessions that run the calls of a store, by the store's address."""


@contextmanager
def beside_session(path):
    """Open a store in a folder, with a session that the local backend holds."""
    with folder(path) as store:
        holder = local(store)
        plan = planned(store, speak, slices=(1, 1), max_failures=9)
        session = submit(holder, store, replace(plan, holds=Session("s")))
        SESSIONS[store.uri] = session.job_id
        while phase_of(holder, session) is JobStatus.PENDING:  # It writes records meanwhile.
            time.sleep(0.01)
        yield store
        holder.cancel(session)
        assert phase_at_end(holder, session) is JobStatus.CANCELLED
        del SESSIONS[store.uri]


def on_session(store):
    return SessionBackend(SESSIONS[store.uri], store, local(store))


BACKENDS = [
    pytest.param((local, folder), id="local"),
    pytest.param((on_session, beside_session), id="session"),
    pytest.param((kubernetes, beside_cluster), id="kubernetes", marks=pytest.mark.kubernetes),
]
"""For each backend: a function that makes it from a store, and one that opens the store."""


def planned(store, func, accelerator="cpu", **options):
    packed = call.pack(func, (), {}, env_vars={}, shipped=Shipped())
    store.put(layout.blob(packed.digest), packed.data, if_absent=True)
    return Plan(
        job_id=new_job_id(),
        name=func.__name__,
        place=Place("local", "gke"),
        options=Options(resolve(accelerator), **options),
        payload=Blob(packed.digest, packed.size_bytes),
        versions=packed.versions,
        created_at=1_700_000_000.0,
    )


def ref_of(plan, backend, store):
    return JobRef(
        plan.job_id,
        Place(backend.name, "gke"),
        plan.topology.name,
        plan.name,
        plan.name,
        time.time(),
        store.uri,
        hosts=plan.hosts,
    )


def submitted(backend, store, func, **more):
    return submit(backend, store, planned(store, func, **more))


def submit(backend, store, plan):
    ref = ref_of(plan, backend, store)
    store.put(layout.JobKeys(plan.job_id).ref, json.dumps(ref.to_json()).encode())
    store.put(layout.JobKeys(plan.job_id).plan, json.dumps(plan.to_json()).encode())
    backend.submit(ref, backend.render(plan), {})
    return ref


def read(backend, ref, **request):
    return [chunk for chunk in backend.logs(ref, LogRequest(**request)) if chunk is not None]


def phase_at_end(backend, ref):
    """Read a job's output until it ends; return its phase then."""
    read(backend, ref)
    return phase_of(backend, ref)


def text(chunks, stream=STDOUT):
    return b"".join(c.data for c in chunks if c.stream == stream)


def speak():
    print("one", flush=True)
    print("two", file=sys.stderr, flush=True)
    print("three", flush=True)


def wait_for_ever():
    print("waiting", flush=True)
    time.sleep(1000)
