"""Submitters of a batch: for a function that is packaged once for all jobs, or for one that submits
jobs itself.

In: calls, ids. Out: handles of submitted jobs.
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
from kinetic._backends.base import Backend, Capacity
from kinetic._client import planning, submission
from kinetic._client.batch.inputs import CallArguments
from kinetic._client.handle import JobHandle
from kinetic._client.planning import Planned, PlanTemplate
from kinetic._core.place import Place
from kinetic._pickling.call import BatchPickler, Packed
from kinetic._store.base import Store
from kinetic.errors import UsageError, UsageTypeError, a_type, text_of

UNKNOWN_ROOM = 64
"""Jobs at a time if the backend does not say how many it has room for."""
IN_MEMORY_BYTES = 64 * 1024**2
"""Pickles that are larger together lie in a temporary file."""


class Submitter(Protocol):
    """Submits one input of a batch at a time: one process starts all jobs of this machine, one
    after the other, and functions that submit may not be thread-safe.

    Attributes:
        known_ids: whether jobs get the given ids.
    """

    known_ids: bool

    def keep_inputs(self) -> None:
        """Inputs are submitted once the caller has gone on, and may have changed them by then: keep
        what they are now."""
        ...

    def submit(self, group_id: str, index: int, job_id: str) -> JobHandle[Any]:
        """Submit; raises if this input cannot be."""
        ...

    def room(self) -> int:
        """Return how many of the jobs run well at a time."""
        ...


class PackagedSubmitter:
    """Calls of one decorated function: its source tree is walked once, and it is pickled once."""

    known_ids = True

    def __init__(
        self,
        calls: Sequence[CallArguments],
        func: Callable[..., Any],
        about: PlanTemplate,
        backend: Backend,
        store: Store,
    ) -> None:
        self._calls = calls
        self._snapshot: CallSnapshot | None = None
        self._about = about
        self._backend = backend
        self._store = store
        self._pickler = BatchPickler(
            func, env_vars=about.captured, shipped=about.shipped, external=planning.data_class()
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the caller, before this leaves the machine."""
        return self._about.complete_plan(self._pickler.function).warnings

    def keep_inputs(self) -> None:
        """Pickle the arguments of all calls. One that cannot be pickled is told when it is
        submitted.

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

    def submit(self, group_id: str, index: int, job_id: str) -> JobHandle[Any]:
        """Pickle the arguments, unless they are kept, and create the job."""
        planned = self.plan_call(group_id, index, job_id)
        ref = submission.submit(planned, self._backend, self._store, on_sent=self._keep)
        return JobHandle(ref, self._backend, self._store)

    def _keep(self, sent: Planned) -> None:
        """All inputs get the source tree that was sent for the first, even if files change
        afterwards."""
        if sent.bundle is not self._about.bundle:
            self._about = dataclasses.replace(self._about, bundle=sent.bundle)

    def room(self) -> int:
        """As many as the backend has room for."""
        return (
            self._backend.room(self._about.draft)
            if isinstance(self._backend, Capacity)
            else UNKNOWN_ROOM
        )

    def plan_call(self, group_id: str, index: int, job_id: str) -> Planned:
        """Plan one call, with its own arguments, id and output folder."""
        folder, kept = self._about.draft.output_dir, self._snapshot
        return self._about.complete_plan(
            self._pack_call(index) if kept is None else kept.read_call(index),
            function=self._pickler.function,
            job_id=job_id,
            created_at=time.time(),
            output_dir=None if folder is None else f"{folder.rstrip('/')}/{index}",
            labels={"group_id": group_id, "group_kind": "map", "group_index": str(index)},
        )


class CallingSubmitter:
    """Calls of any function that returns a job's handle."""

    known_ids = False

    def __init__(
        self, calls: Sequence[CallArguments], func: Callable[..., Any], store: Store
    ) -> None:
        self._calls = calls
        self._store = store
        self._func = func

    def keep_inputs(self) -> None:
        """Nothing: the function gets the inputs themselves."""

    def submit(self, group_id: str, index: int, job_id: str) -> JobHandle[Any]:
        """Call the function."""
        call = self._calls[index]
        handle = self._func(*call.args, **call.kwargs)
        if not isinstance(handle, JobHandle):
            raise UsageTypeError(
                "The function that submits must return a job's handle; it returned "
                f"{a_type(handle)}. Pass a function decorated with @kinetic.run, or its run_async."
            )
        return handle.add_to_batch(group_id, index)

    def room(self) -> int:
        """Unknown: assume jobs of one host on this machine, where the store allows them."""
        if self._store.as_folder() is None:
            return UNKNOWN_ROOM
        backend = registry.make(Place("local"), self._store)
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
