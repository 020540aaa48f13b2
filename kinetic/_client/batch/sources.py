"""The sources of a batch's jobs: a decorated function, packaged once for all jobs, or a function
that submits jobs itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kinetic._backends import registry
from kinetic._backends.base import Capacity
from kinetic._client import planning, submission
from kinetic._client.batch.inputs import CallArguments, job_id_of
from kinetic._client.handle import JobHandle
from kinetic._client.planning import BatchMember, Planned, Target
from kinetic._config.settings import Settings
from kinetic._pickling.call import BatchPickler, Packed
from kinetic._store.base import Store
from kinetic.errors import UsageError, UsageTypeError, a_type

UNKNOWN_ROOM = 64
"""The number of concurrent jobs on a backend that does not report its capacity."""


class JobSource(Protocol):
    """Submits a batch's inputs, from one thread only: user functions may not be thread-safe."""

    def snapshot_inputs(self) -> None:
        """Copy the inputs, because the caller may change them before they are submitted."""
        ...

    def submit(self, group_id: str, index: int) -> JobHandle[Any]:
        """Submit the job of an input, whose id follows from the batch and the index. Raises if the
        input cannot be submitted."""
        ...

    def room(self) -> int:
        """Return the number of jobs that fit the backend at the same time."""
        ...


class PackagedCalls:
    """Calls of one decorated function. The source tree is read once, the function pickled once."""

    def __init__(
        self,
        calls: Sequence[CallArguments],
        func: Callable[..., Any],
        shared: Planned,
        target: Target,
    ) -> None:
        self._calls = calls
        self._snapshot: list[Packed | Exception] | None = None
        self._shared = shared
        self._target = target
        self._pickler = BatchPickler(
            func, env_vars=shared.captured, shipped=shared.shipped, external=planning.data_class()
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings to print before the first job is submitted."""
        return self._shared.with_call(self._pickler.function).warnings

    def snapshot_inputs(self) -> None:
        """Pickle the arguments of all calls. `submit` raises the error if one cannot be pickled."""
        self._snapshot = [self._try_pack(index) for index in range(len(self._calls))]
        self._calls = ()

    def _try_pack(self, index: int) -> Packed | Exception:
        try:
            return self._pack_call(index)
        except Exception as error:  # noqa: BLE001 - packing runs the user's code; one input must not end the others
            return error

    def _pack_call(self, index: int) -> Packed:
        call = self._calls[index]
        # Drop `parts`, which refer to the input's objects: each would be pickled once more.
        return replace(self._pickler.pack(call.args, call.kwargs), parts=tuple)

    def submit(self, group_id: str, index: int) -> JobHandle[Any]:
        """Create the job. Pickle the arguments first, unless `snapshot_inputs` has done it."""
        backend, store = self._target.backend, self._target.store
        planned = self.plan_call(group_id, index)
        ref = submission.submit(planned, backend, store, on_sent=self._share_bundle)
        return JobHandle(ref, backend, store)

    def _share_bundle(self, sent: Planned) -> None:
        """Use the first job's source tree for all jobs, even if files change later."""
        if sent.bundle is not self._shared.bundle:
            self._shared = replace(self._shared, bundle=sent.bundle)

    def room(self) -> int:
        """Return the number of such jobs that fit the backend at the same time."""
        backend = self._target.backend
        return backend.room(self._shared.plan) if isinstance(backend, Capacity) else UNKNOWN_ROOM

    def plan_call(self, group_id: str, index: int) -> Planned:
        """Return the plan of one call, with its own arguments, id and output folder."""
        folder, snapshot = self._shared.plan.output_dir, self._snapshot
        packed = self._pack_call(index) if snapshot is None else snapshot[index]
        if isinstance(packed, Exception):
            raise packed
        return self._shared.with_call(
            packed,
            function=self._pickler.function,
            job_id=job_id_of(group_id, index),
            created_at=time.time(),
            output_dir=None if folder is None else f"{folder.rstrip('/')}/{index}",
            labels=planning.batch_labels(group_id, index),
        )


class CallingFunction:
    """Calls of a function that submits a job with `run_async` and returns its handle."""

    def __init__(
        self,
        calls: Sequence[CallArguments],
        func: Callable[..., Any],
        settings: Settings,
        store: Store,
        retries: int,
    ) -> None:
        self._calls = calls
        self._func = func
        self._settings = settings
        self._store = store
        self._retries = retries

    def snapshot_inputs(self) -> None:
        """Do nothing: the function gets the inputs themselves."""

    def submit(self, group_id: str, index: int) -> JobHandle[Any]:
        """Call the function. The first job that it submits becomes the input's job."""
        call, job_id = self._calls[index], job_id_of(group_id, index)
        member = BatchMember(group_id, index, job_id, self._store.uri, self._retries)
        with planning.member_of_batch(member):
            handle = self._func(*call.args, **call.kwargs)
        if not isinstance(handle, JobHandle):
            raise UsageTypeError(
                "The function passed to map must submit a job with run_async and return its "
                f"handle; it returned {a_type(handle)}. Pass a function decorated with "
                "@kinetic.run, or return what run_async returns."
            )
        if handle.job_id != job_id:
            raise UsageError(
                "The function passed to map must submit a new job in each call and return its "
                f"handle; it returned the handle of another job, {handle.job_id}. Call run_async "
                "in the function, and return the first handle that you get."
            )
        return handle

    def room(self) -> int:
        """Return the number of one-host jobs that fit the configured backend at the same time."""
        backend = registry.make(planning.default_place(self._settings), self._store)
        return backend.room(None) if isinstance(backend, Capacity) else UNKNOWN_ROOM
