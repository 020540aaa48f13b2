"""Run a decorated Python function on an accelerator slice and get its value back.

Public names are imported on first use, so that `import kinetic` is quick.
"""

from kinetic import _shadows

_shadows.warn_of_hidden_modules()  # First: hidden modules may break other imports.

import sys  # noqa: E402

from kinetic.version import __version__  # noqa: E402

TYPE_CHECKING = not __name__  # False, but jedi (Jupyter, vim) assumes True.
if TYPE_CHECKING:
    from kinetic import collections as collections
    from kinetic import credentials as credentials
    from kinetic import debug as debug
    from kinetic import errors as errors
    from kinetic import job_status as job_status
    from kinetic import jobs as jobs
    from kinetic._client.batch.handle import BatchHandle as BatchHandle
    from kinetic._client.batch.handle import attach_batch as attach_batch
    from kinetic._client.compiling import compile_for as compile_for
    from kinetic._client.decorator import run as run
    from kinetic._client.futures import as_completed as as_completed
    from kinetic._client.handle import JobHandle as JobHandle
    from kinetic._client.remote import RemoteCallable as RemoteCallable
    from kinetic._client.sessions import SessionHandle as SessionHandle
    from kinetic._client.sessions import session as session
    from kinetic._compile.report import CompileReport as CompileReport
    from kinetic._compile.slice import CompileSlice as CompileSlice
    from kinetic._dashboard.start import dashboard as dashboard
    from kinetic._datasets.data import Data as Data
    from kinetic._in_job.checkpoint.checkpointer import Checkpointer as Checkpointer
    from kinetic._in_job.elastic import reform as reform
    from kinetic._in_job.elastic import should_reform as should_reform
    from kinetic._in_job.kept import kept as kept
    from kinetic._in_job.mesh import make_mesh as make_mesh
    from kinetic._in_job.metrics import log as log
    from kinetic._in_job.preemption import preempted as preempted
    from kinetic._in_job.slices import attempt as attempt
    from kinetic._in_job.slices import num_slices as num_slices
    from kinetic._in_job.slices import slice_index as slice_index
    from kinetic.errors import BatchError as BatchError
    from kinetic.jobs import attach as attach
    from kinetic.jobs import list_jobs as list_jobs

_HOMES = {
    "BatchError": "errors",
    "BatchHandle": "_client.batch.handle",
    "CompileReport": "_compile.report",
    "CompileSlice": "_compile.slice",
    "Checkpointer": "_in_job.checkpoint.checkpointer",
    "Data": "_datasets.data",
    "JobHandle": "_client.handle",
    "RemoteCallable": "_client.remote",
    "SessionHandle": "_client.sessions",
    "as_completed": "_client.futures",
    "attach": "jobs",
    "attach_batch": "_client.batch.handle",
    "attempt": "_in_job.slices",
    "compile_for": "_client.compiling",
    "dashboard": "_dashboard.start",
    "kept": "_in_job.kept",
    "list_jobs": "jobs",
    "log": "_in_job.metrics",
    "make_mesh": "_in_job.mesh",
    "num_slices": "_in_job.slices",
    "preempted": "_in_job.preemption",
    "reform": "_in_job.elastic",
    "run": "_client.decorator",
    "session": "_client.sessions",
    "should_reform": "_in_job.elastic",
    "slice_index": "_in_job.slices",
}
_SUBMODULES = ("collections", "credentials", "debug", "errors", "job_status", "jobs", "keras")
_RENAMED = {
    "map": "use the decorated function's run_async_map(inputs), or kinetic.collections.map",
    "submit": "decorate with @kinetic.run(...), and call the function's run_async(...)",
}
"""Names of keras-kinetic before 0.0.4, and what to write instead."""

__all__ = [
    "BatchError",
    "BatchHandle",
    "Checkpointer",
    "CompileReport",
    "CompileSlice",
    "Data",
    "JobHandle",
    "RemoteCallable",
    "SessionHandle",
    "__version__",
    "as_completed",
    "attach",
    "attach_batch",
    "attempt",
    "compile_for",
    "dashboard",
    "errors",
    "kept",
    "list_jobs",
    "log",
    "make_mesh",
    "num_slices",
    "preempted",
    "reform",
    "run",
    "session",
    "should_reform",
    "slice_index",
]


if not TYPE_CHECKING:  # A type checker should report misspelt names.

    def __getattr__(name):
        from importlib import import_module

        if name in _SUBMODULES:
            return import_module(f"kinetic.{name}")
        if name not in _HOMES:
            instead = f": {_RENAMED[name]}" if name in _RENAMED else ""
            raise AttributeError(f"module 'kinetic' has no attribute {name!r}{instead}")
        globals()[name] = value = getattr(import_module(f"kinetic.{_HOMES[name]}"), name)
        return value


if "IPython" in sys.modules:
    from kinetic._client import notebook

    notebook.add_magic()
    del notebook


def __dir__() -> list[str]:
    names = {name for name in globals() if name.startswith("__")}
    return sorted(names.union(__all__, _SUBMODULES) - {"keras"})  # kinetic.keras imports Keras.
