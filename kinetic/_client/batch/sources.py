"""The submission of a batch's jobs: of a function that is packaged once for all of them, or by one
that submits jobs itself.

In: calls. Out: handles of submitted jobs.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from kinetic.errors import UsageError, UsageTypeError, a_type, text_of

UNKNOWN_ROOM = 64
"""Jobs at a time if the backend does not say how many it has room for."""
IN_MEMORY_BYTES = 64 * 1024**2
"""Pickles that are larger together lie in a temporary file."""


class JobSource(Protocol):
    """Submits one input of a batch at a time: one process starts all jobs of this machine, one
    after the other, and functions that submit may not be thread-safe."""

    def keep_inputs(self) -> None:
        """Inputs are submitted once the caller has gone on, and may have changed them by then: keep
        what they are now."""
        ...

    def submit(self, group_id: str, index: int) -> JobHandle[Any]:
        """Submit the job whose id follows from both; raises if this input cannot be."""
        ...

    def room(self) -> int:
        """Return how many of the jobs run well at a time."""
        ...


class PackagedCalls:
    """Calls of one decorated function: its source tree is walked once, and it is pickled once."""

    def __init__(
        self,
        calls: Sequence[CallArguments],
        func: Callable[..., Any],
        shared: Planned,
        target: Target,
    ) -> None:
        self._calls = calls
        self._snapshot: CallSnapshot | None = None
        self._shared = shared
        self._target = target
        self._pickler = BatchPickler(
            func, env_vars=shared.captured, shipped=shared.shipped, external=planning.data_class()
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the caller, before this leaves the machine."""
        return self._shared.with_call(self._pickler.function).warnings

    def keep_inputs(self) -> None:
        """Pickle the arguments of all calls. The error of one that cannot be pickled is raised when
        it is submitted.

        Raises:
            UsageError: there is no room for them.
        """
        self._snapshot = CallSnapshot(self._try_all())
        self._calls = ()

    def _try_all(self) -> Iterator[Packed | Exception]:
        for index in range(len(self._calls)):
            try:
                yield self._pack_call(index)
            except Exception as error:  # noqa: BLE001 - packing runs the user's code; one input must not end the others
                yield error

    def _pack_call(self, index: int) -> Packed:
        call = self._calls[index]
        return self._pickler.pack(call.args, call.kwargs)

    def submit(self, group_id: str, index: int) -> JobHandle[Any]:
        """Pickle the arguments, unless they are kept, and create the job."""
        backend, store = self._target.backend, self._target.store
        planned = self.plan_call(group_id, index)
        ref = submission.submit(planned, backend, store, on_sent=self._keep)
        return JobHandle(ref, backend, store)

    def _keep(self, sent: Planned) -> None:
        """All inputs get the source tree that was sent for the first, even if files change
        afterwards."""
        if sent.bundle is not self._shared.bundle:
            self._shared = dataclasses.replace(self._shared, bundle=sent.bundle)

    def room(self) -> int:
        """As many as the backend has room for."""
        backend = self._target.backend
        return backend.room(self._shared.plan) if isinstance(backend, Capacity) else UNKNOWN_ROOM

    def plan_call(self, group_id: str, index: int) -> Planned:
        """Plan one call, with its own arguments, id and output folder."""
        folder, snapshot = self._shared.plan.output_dir, self._snapshot
        return self._shared.with_call(
            self._pack_call(index) if snapshot is None else snapshot.read_call(index),
            function=self._pickler.function,
            job_id=job_id_of(group_id, index),
            created_at=time.time(),
            output_dir=None if folder is None else f"{folder.rstrip('/')}/{index}",
            labels=planning.batch_labels(group_id, index),
        )


class CallingFunction:
    """Calls of any function that submits a job with `run_async` and returns its handle."""

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

    def keep_inputs(self) -> None:
        """Nothing: the function gets the inputs themselves."""

    def submit(self, group_id: str, index: int) -> JobHandle[Any]:
        """Call the function; the job that it submits becomes the input's."""
        call, job_id = self._calls[index], job_id_of(group_id, index)
        member = BatchMember(group_id, index, job_id, self._store.uri, self._retries)
        with planning.member_of_batch(member):
            handle = self._func(*call.args, **call.kwargs)
        if not isinstance(handle, JobHandle):
            raise UsageTypeError(
                "The function that submits must return a job's handle; it returned "
                f"{a_type(handle)}. Pass a function decorated with @kinetic.run, or its run_async."
            )
        if handle.job_id != job_id:
            raise UsageError(
                f"The function must submit with run_async, and return the handle of its first job; "
                f"it returned the handle of {handle.job_id}, which does not belong to the batch."
            )
        return handle

    def room(self) -> int:
        """As many jobs of one host as the configured backend has room for."""
        backend = registry.make(planning.default_place(self._settings), self._store)
        return backend.room(None) if isinstance(backend, Capacity) else UNKNOWN_ROOM


class CallSnapshot:
    """The calls of a batch as they were when it began: the caller may change an input afterwards,
    and a call may be submitted much later, or once more. Each is pickled, or an error if it could
    not be."""

    def __init__(self, calls: Iterable[Packed | Exception]) -> None:
        """Take the calls.

        Raises:
            UsageError: the folder for temporary files has no room for them.
        """
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)
        weakref.finalize(self, self._file.close)
        self._calls: list[tuple[int, Packed] | Exception] = []
        end = 0
        for call in calls:
            if isinstance(call, Exception):
                self._calls.append(call)
                continue
            try:
                self._file.write(call.data)
            except OSError as error:
                raise UsageError(
                    f"The inputs do not fit into {tempfile.gettempdir()}, where they are kept "
                    f"until their jobs are submitted: {text_of(error)}. Pass paths or kinetic.Data "
                    "instead of what is large, or set TMPDIR to a folder with more room. Nothing "
                    "was submitted."
                ) from error
            # Its parts hold the input itself.
            self._calls.append((end, replace(call, data=b"", parts=tuple)))
            end += call.size_bytes

    def read_call(self, index: int) -> Packed:
        """Return one call; raises why it could not be pickled."""
        call = self._calls[index]
        if isinstance(call, Exception):
            raise call
        start, packed = call
        self._file.seek(start)
        return replace(packed, data=self._file.read(packed.size_bytes))
