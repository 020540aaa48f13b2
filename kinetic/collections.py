"""Public: run one job for each of many inputs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from kinetic._client.batch import launch
from kinetic._client.batch.handle import BatchHandle, attach_batch
from kinetic._client.batch.inputs import list_calls
from kinetic._client.batch.sources import CallingFunction
from kinetic._client.remote import RemoteCallable
from kinetic._config import settings as configuration
from kinetic._core import checks, spec
from kinetic._core.tracebacks import hide_frames
from kinetic._store.open import open_store
from kinetic.errors import BatchError, UsageTypeError

if TYPE_CHECKING:
    from kinetic._client.batch.launch import AtOnce, BatchOptions, Tags
    from kinetic._client.handle import JobHandle

R = TypeVar("R")

__all__ = ["BatchError", "BatchHandle", "attach_batch", "map"]


@overload
def map(
    submit_fn: RemoteCallable[..., Coroutine[Any, Any, R]],
    inputs: Iterable[Any],
    **options: Unpack[BatchOptions],
) -> BatchHandle[R]: ...


@overload
def map(
    submit_fn: RemoteCallable[..., R], inputs: Iterable[Any], **options: Unpack[BatchOptions]
) -> BatchHandle[R]: ...


@overload
def map(
    submit_fn: Callable[..., JobHandle[R]], inputs: Iterable[Any], **options: Unpack[BatchOptions]
) -> BatchHandle[R]: ...


@hide_frames
def map(
    submit_fn: Callable[..., Any],
    inputs: Iterable[Any],
    *,
    input_mode: str = "auto",
    max_concurrent: AtOnce = "auto",
    retries: int = 0,
    fail_fast: bool = False,
    cancel_running_on_fail: bool = False,
    name: str | None = None,
    tags: Tags | None = None,
    project: str | None = None,
    cluster: str | None = None,
) -> BatchHandle[Any]:
    """Submit a job for each input. The options are those of `RemoteCallable.run_async_map`.

    Args:
        submit_fn: A decorated function or its `run_async`, which is packaged once for all inputs;
            or any function that submits one job with `run_async` and returns its handle, which is
            called with each input when its job can be submitted.
        inputs: One entry for each job.

    Raises:
        UsageError: An input or an option is invalid; nothing was submitted.

    Example:
        ```python
        batch = kinetic.collections.map(train, [{"lr": 1e-3}, {"lr": 1e-4}])
        losses = batch.results()
        ```
    """
    remote = _find_decorated(submit_fn)
    if remote is not None:
        return remote.run_async_map(
            inputs,
            input_mode=input_mode,
            max_concurrent=max_concurrent,
            retries=retries,
            fail_fast=fail_fast,
            cancel_running_on_fail=cancel_running_on_fail,
            name=name,
            tags=tags,
            project=project,
            cluster=cluster,
        )
    if not callable(submit_fn):
        raise UsageTypeError(
            "submit_fn= must be a decorated function, or a function that submits a job with "
            f"run_async; got {submit_fn!r}."
        )
    batch_rules = launch.check_rules(
        max_concurrent=max_concurrent,
        fail_fast=fail_fast,
        cancel_running_on_fail=cancel_running_on_fail,
    )
    calls = list_calls(inputs, input_mode)
    settings = configuration.load(flags={"project": project, "cluster": cluster})
    store = open_store(settings.store)
    retries = checks.count("retries", retries, least=0)
    source = CallingFunction(calls, submit_fn, settings, store, retries)
    title = checks.text("name", name) or spec.name_of(submit_fn)
    return launch.launch(
        source, store, len(calls), batch_rules, name=title, notes=launch.check_tags(tags)
    )


def _find_decorated(submit_fn: Any) -> RemoteCallable[..., Any] | None:
    """Return the decorated function if `submit_fn` is one, or is `run_async` of one; else None."""
    if isinstance(submit_fn, RemoteCallable):
        return submit_fn
    owner = getattr(submit_fn, "__self__", None)
    is_run_async = isinstance(owner, RemoteCallable) and submit_fn.__name__ == "run_async"
    return owner if is_run_async else None
