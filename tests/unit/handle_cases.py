"""Fixtures for tests of handles: a running job, and a fake backend that the test controls."""

from __future__ import annotations

import pytest
from laptop_fakes import FakeBackend, put_ref, put_success, ref

from kinetic._backends import registry
from kinetic._client.handle import JobHandle
from kinetic._store.local import LocalStore
from kinetic.job_status import JobStatus


@pytest.fixture
def store(home):
    return LocalStore(home)


@pytest.fixture
def backend(store):
    fake = FakeBackend(store)
    with registry.substitute_backend("local", lambda *_: fake):
        yield fake


@pytest.fixture
def job(store, backend):
    kept = put_ref(store, ref())
    backend.phases[kept.job_id] = JobStatus.RUNNING
    return kept


@pytest.fixture
def handle(job, store, backend):
    return JobHandle(job, backend, store, clock=iter(range(10**6)).__next__)


def ends_with(backend, store, job, value):
    backend.finish = lambda: put_success(store, job, value)
