"""A decorated function, and the ways of calling it: remotely, in the background, over many inputs,
from async code, or in this process."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from kinetic._client.options import OptionChanges, check_options, warn_of_spot
from kinetic._core import checks, spec
from kinetic._core.options import Options
from kinetic._core.tracebacks import hide_frames
from kinetic._pickling import origin
from kinetic.errors import UsageError, UsageTypeError

if TYPE_CHECKING:
    from kinetic._client.batch.handle import BatchHandle
    from kinetic._client.batch.launch import AtOnce, BatchOptions, Tags
    from kinetic._client.handle import JobHandle
    from kinetic._client.plan_view import PlanView
    from kinetic._client.planning import Target

_DATA = "kinetic._datasets.data"
"""The module of `kinetic.Data`: until it is imported, no argument can be a `Data`."""

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
P2 = ParamSpec("P2")
R2 = TypeVar("R2")
First = TypeVar("First")


class RemoteCallable(Generic[P, R_co]):
    """A function that `kinetic.run` has decorated: calling it runs it on an accelerator slice.

    A decorated method works as a method. For an async function, the value is the result of its
    coroutine. Inside a job it acts as the undecorated function: a call runs its body on that host.

    Example:
        ```python
        loss = train(1000)  # wait for the value
        job = train.run_async(1000)  # or get a handle at once
        ```
    """

    is_plain_in_jobs = True  # for `_pickling`

    def __init__(
        self, func: Callable[P, Any], options: Options, *, bound: tuple[Any, ...] = ()
    ) -> None:
        self._unbound: Any = func  # With its `classmethod` or `staticmethod` wrapper.
        if isinstance(func, classmethod | staticmethod):
            func = func.__func__
        if isinstance(func, RemoteCallable):
            raise UsageTypeError(
                f"{spec.name_of(func)} is already decorated with @kinetic.run. Decorate it only "
                "once."
            )
        spec.check_function(func)
        origin.remember_namespace(func)
        is_function = inspect.isroutine(func)
        functools.update_wrapper(self, func, updated=("__dict__",) if is_function else ())
        if not hasattr(self, "__qualname__"):
            self.__name__ = self.__qualname__ = spec.name_of(func)
        self._func = func
        self._options = options
        self._bound = bound
        self._module_spec = getattr(sys.modules.get(self.__module__), "__spec__", None)

    @property
    def options(self) -> Options:
        """The options of the decorator."""
        return self._options

    @property
    def func(self) -> Callable[..., Any]:
        """The undecorated function. If its module was reloaded after decoration (`%autoreload`,
        `importlib.reload`), the function from the reloaded module."""
        module: Any = sys.modules.get(self.__module__)
        if getattr(module, "__spec__", None) is self._module_spec or self.__module__ in origin.MAIN:
            return self._func
        successor = module
        for name in self.__qualname__.split("."):
            successor = getattr(successor, "__dict__", {}).get(name)
        successor = getattr(successor, "__func__", successor)  # of a classmethod
        if not isinstance(successor, RemoteCallable):
            return self._func
        names = successor.__module__, successor.__qualname__
        return successor._func if names == (self.__module__, self.__qualname__) else self._func

    def _derive(self, options: Options, bound: tuple[Any, ...]) -> RemoteCallable[Any, Any]:
        func = self._func if bound else self._unbound
        derived: RemoteCallable[Any, Any] = RemoteCallable(func, options, bound=bound)
        derived._module_spec = self._module_spec
        return derived

    if not TYPE_CHECKING:  # A type checker should report misspelt names.

        def __getattr__(self, name):
            why = f"a decorated function has no attribute {name!r}{spec.instead_of(name)}"
            raise AttributeError(why, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<RemoteCallable {self.__qualname__} on {self._options.topology.name}>"

    @hide_frames
    def with_options(self, **changes: Unpack[OptionChanges]) -> RemoteCallable[P, R_co]:
        """Return the same function with other options.

        Args:
            changes: Options of `kinetic.run`, by name. Each replaces the decorator's option as a
                whole, also `env=`; other options stay.

        Raises:
            UsageError: An option is invalid.

        Example:
            ```python
            loss = train.with_options(accelerator="tpu-v6e-16", timeout="1h")(1000)
            ```
        """
        options = check_options(self._options, changes)
        warn_of_spot(options)
        return self._derive(options, self._bound)

    # -- calling -----------------------------------------------------------------------------------

    @overload
    def __call__(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> R2: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @hide_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the slice and wait: print host 0's output as it arrives, then return
        the value of JAX's process 0.

        Raises:
            Exception: The exception that the function raised, with its traceback on the host.
            UsageError: The call is invalid; nothing was submitted.
            JobFailed: The job failed for another reason.
        """
        from kinetic._config import settings

        if settings.on_host():
            value = self._run_body(args, kwargs)
            is_ours = inspect.iscoroutine(value) and not is_loop_running()
            return run_coroutine(value) if is_ours else value
        return self._call_and_wait(threading.Event(), args, kwargs)

    def _call_and_wait(self, abandoned: threading.Event, args: Any, kwargs: Any) -> Any:
        """Submit, print the output, return the value; stop if another thread sets `abandoned`."""
        submit = functools.partial(self._submit_job, args, kwargs)
        if self._options.debug:
            from kinetic._client import debugging

            return debugging.follow_call(submit, abandoned)
        handle = submit()
        try:
            return handle.call_result(abandoned)
        finally:
            if self._options.compile_check and handle.outcome() is not None:
                from kinetic._client.compiling import show_report

                show_report(handle.compile_report)

    @overload
    async def aio(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> R2: ...

    @overload
    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    async def aio(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function from async code, without blocking the asyncio event loop.

        It behaves like a plain call otherwise. Cancelling the await leaves the job running, and
        prints how to reattach to it.

        Example:
            ```python
            loss = await train.aio(1000)
            ```
        """
        from kinetic._client import futures
        from kinetic._config import settings

        if settings.on_host():
            value = self._run_body(args, kwargs)
            return await value if inspect.isawaitable(value) else value
        abandoned = threading.Event()
        try:
            with hide_frames:
                call = functools.partial(self._call_and_wait, abandoned, args, kwargs)
                return await futures.run_in_thread(call)
        finally:
            abandoned.set()

    @overload
    def run_async(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> JobHandle[R2]: ...

    @overload
    def run_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R_co]: ...

    @hide_frames
    def run_async(self, *args: Any, **kwargs: Any) -> JobHandle[Any]:
        """Submit the job and return its handle at once. The job runs independently of this process.

        Raises:
            UsageError: The call is invalid; nothing was submitted.
            PreflightError: The backend cannot run such a job now; nothing was submitted.
            SubmitError: The backend could not create the job.
        """
        return self._submit_job(args, kwargs)

    def _submit_job(self, args: Any, kwargs: Any) -> JobHandle[Any]:
        from kinetic._client import planning

        member = planning.batch_member.get()
        options = self._options
        if member is not None and member.retries:
            options = check_options(options, {"retries": member.retries})
        target = self._find_target(options, args, kwargs)
        if member is not None and member.store_uri != target.store.uri:
            raise UsageError(
                f"map uses the store {member.store_uri}, but the function's own project= and "
                f"cluster= select {target.store.uri}. Pass the same project= and cluster= to map. "
                "Nothing was submitted."
            )
        target.warm_up(options)
        planned = planning.plan_call(
            self.func,
            (*self._bound, *args),
            kwargs,
            options,
            settings=target.settings,
            place=target.place,
            name=self.__qualname__,
            member=member,
        )

        from kinetic._client import submission

        submission.warn(target, planned.warnings, planned.plan.output_dir)
        if "kinetic._client.handle" not in sys.modules:
            load = functools.partial(importlib.import_module, "kinetic._client.handle")
            threading.Thread(target=load, daemon=True).start()  # Import while the backend works.
        ref = submission.submit(planned, target.backend, target.store)
        planning.reuse_store(target.store)
        planning.batch_member.set(None)  # Later jobs do not belong to the batch.
        try:
            from kinetic._client.handle import JobHandle

            return JobHandle(ref, target.backend, target.store)
        except KeyboardInterrupt as interrupt:
            submission.take_back(ref, target.backend, target.store, interrupt)
            raise

    def _find_target(self, options: Options, args: Any, kwargs: Any) -> Target:
        """Check the arguments of a call; return the place, backend and store of its job."""
        from kinetic._client.planning import target_of

        self._check_place()
        self._check_call(args, kwargs)
        return target_of(options)

    def _check_place(self) -> None:
        """Refuse to submit a job from inside a job: the inner job could outlive the outer one, and
        no process would watch it then."""
        from kinetic._config import settings

        if settings.on_host():
            raise UsageError(
                f"A job cannot submit other jobs. In a job, {self.__name__}(...) runs the function "
                "on the same host; to run it elsewhere, submit it from the script that submitted "
                "this job."
            )

    @overload
    def run_async_map(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]],
        inputs: Iterable[Any],
        **options: Unpack[BatchOptions],
    ) -> BatchHandle[R2]: ...

    @overload
    def run_async_map(
        self, inputs: Iterable[Any], **options: Unpack[BatchOptions]
    ) -> BatchHandle[R_co]: ...

    @hide_frames
    def run_async_map(
        self,
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
        """Submit a job for each input, and return at once.

        The source tree and the function are packaged once for all jobs. Inputs are copied now:
        changing one afterwards does not change its job.

        Args:
            inputs: One entry for each job.
            input_mode: "single" passes an entry as the only argument, "args" a list or tuple as
                positional arguments, "kwargs" a dict as keyword arguments; "auto" decides by the
                entry's type.
            max_concurrent: The most jobs that run at the same time. "auto" fits the processors and
                memory of this machine, or the cluster; None runs all at once.
            retries: How often each failed job is retried, as the option `retries=` of one job.
            fail_fast: Submit nothing more after the first failure.
            cancel_running_on_fail: With `fail_fast`, also cancel the running jobs.
            name: The batch's name for users; by default the name of its jobs.
            tags: Your own notes, a dict or a list of strings.
            project: The cluster's project, instead of the decorator's.
            cluster: The cluster, instead of the decorator's.

        Raises:
            UsageError: An input or an option is invalid, or the function cannot be pickled;
                nothing was submitted.
            PreflightError: The backend cannot run such jobs now; nothing was submitted.

        Example:
            ```python
            batch = train.run_async_map([{"lr": 1e-3}, {"lr": 1e-4}])
            losses = batch.results()
            ```
        """
        from kinetic._client import planning, submission
        from kinetic._client.batch import launch
        from kinetic._client.batch.inputs import list_calls
        from kinetic._client.batch.sources import PackagedCalls

        self._check_place()
        batch_rules = launch.check_rules(
            max_concurrent=max_concurrent,
            fail_fast=fail_fast,
            cancel_running_on_fail=cancel_running_on_fail,
        )
        title = checks.text("name", name) or self._options.name or self.__qualname__
        notes, calls = launch.check_tags(tags), list_calls(inputs, input_mode)
        for index, call in enumerate(calls):
            self._check_call(call.args, call.kwargs, f"inputs[{index}]: ")
        changes: dict[str, Any] = {"project": project, "cluster": cluster}
        changes = {option: value for option, value in changes.items() if value is not None}
        if checks.count("retries", retries, least=0):
            changes["retries"] = retries
        options = check_options(self._options, changes)
        target = planning.target_of(options)
        target.warm_up(options)
        func = functools.partial(self.func, *self._bound) if self._bound else self.func
        shared = submission.plan_batch(
            func, [(call.args, call.kwargs) for call in calls], options, target, self.__qualname__
        )
        source = PackagedCalls(calls, func, shared, target)
        submission.warn(target, source.warnings, shared.plan.output_dir)
        return launch.launch(source, target.store, len(calls), batch_rules, name=title, notes=notes)

    @hide_frames
    def plan(self, *args: P.args, **kwargs: P.kwargs) -> PlanView:
        """Return the plan of a call: its files, packages, price and warnings. Creates nothing.

        Raises:
            UsageError: The call is invalid.
        """
        from kinetic._client import planning
        from kinetic._client.plan_view import PlanView

        target = self._find_target(self._options, args, kwargs)
        planned = planning.plan_call(
            self.func,
            (*self._bound, *args),
            kwargs,
            self._options,
            settings=target.settings,
            place=target.place,
            name=self.__qualname__,
        )
        documents = tuple(target.backend.render(planned.plan))
        files = () if planned.bundle is None else tuple(planned.bundle.files())
        requirements = planned.plan.requirements
        text = "" if requirements is None else planned.installed[requirements.digest].decode()
        return PlanView(planned.plan, documents, planned.warnings, files, tuple(text.splitlines()))

    @overload
    def local(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> R2: ...

    @overload
    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @hide_frames
    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function in this process, without a job. Local `kinetic.Data` arrive as paths.

        Example:
            ```python
            loss = train.local(10)
            ```
        """
        value = self._run_body(args, kwargs)
        return run_coroutine(value) if inspect.iscoroutine(value) else value

    def _run_body(self, args: Any, kwargs: Any) -> Any:
        if _DATA in sys.modules:
            from kinetic._datasets import call_data

            args, kwargs = call_data.localize(args), call_data.localize(kwargs)
        return self.func(*self._bound, *args, **kwargs)

    # -- binding and pickling ----------------------------------------------------------------------

    # mypy uses the first overload for every lookup on a class, so it must not be strict
    # about arguments.
    @overload
    def __get__(
        self: RemoteCallable[Concatenate[First, P2], R2], instance: None, owner: First, /
    ) -> RemoteCallable[..., R2]: ...

    @overload
    def __get__(self, instance: None, owner: type[Any], /) -> RemoteCallable[P, R_co]: ...

    @overload
    def __get__(
        self: RemoteCallable[Concatenate[First, P2], R2],
        instance: First,
        owner: type[Any] | None = None,
        /,
    ) -> RemoteCallable[P2, R2]: ...

    @overload
    def __get__(
        self: RemoteCallable[Concatenate[First, P2], R2], instance: object, owner: First, /
    ) -> RemoteCallable[P2, R2]: ...

    @overload
    def __get__(
        self, instance: object, owner: type[Any] | None = None, /
    ) -> RemoteCallable[P, R_co]: ...

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        if isinstance(self._unbound, classmethod):
            first = type(instance) if owner is None else owner
        elif hasattr(self._unbound, "__get__") and not isinstance(self._unbound, staticmethod):
            first = instance
        else:
            first = None
        if first is None or self._bound:
            return self
        return self._derive(self._options, (first,))

    def __reduce__(self) -> tuple[Any, ...] | str:
        if origin.is_importable(self) and not origin.is_cloudpickle(sys._getframe(1)):
            return self.__qualname__
        # Pickle the plain function, with the standard library only: unpickling must not need
        # kinetic.
        func = self.func
        if self._bound:
            func = functools.partial(func, *self._bound)
        elif func is self._func:
            func = self._unbound
        return operator.itemgetter(0), ((func,),)

    def __copy__(self) -> RemoteCallable[P, R_co]:
        return self

    def __deepcopy__(self, memo: Any) -> RemoteCallable[P, R_co]:
        return self

    # -- inside ------------------------------------------------------------------------------------

    def _check_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str = ""
    ) -> None:
        owner = origin.find_class_of(self) if not self._bound else None
        if owner is not None and not (
            args and isinstance(args[0], type) and issubclass(args[0], owner)
        ):
            raise UsageTypeError(
                f"{where}Put @kinetic.run above @classmethod: below it, kinetic does not get the "
                f"class on which {self.__qualname__} is called. Nothing was submitted."
            )
        try:
            # Do not follow the wrapper of another decorator: it may change the arguments. Follow
            # `jax.jit`, which never does.
            signature = inspect.signature(
                self.func, follow_wrapped=not isinstance(self.func, FunctionType)
            )
        except (ValueError, TypeError):  # Some builtins have no signature; the host checks.
            return
        try:
            signature.bind(*self._bound, *args, **kwargs)
        except TypeError as error:
            why = spec.wrong_keyword(signature, kwargs) or error
            raise UsageTypeError(
                f"{where}{self.__name__}{signature}: {why}. Nothing was submitted."
            ) from None


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its result; in a new thread if an event loop runs in this one, as
    in a notebook."""
    import asyncio

    if not is_loop_running():
        return asyncio.run(coroutine)
    from concurrent.futures import ThreadPoolExecutor
    from contextvars import copy_context

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, coroutine).result()


def is_loop_running() -> bool:
    """True if an asyncio event loop runs in this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
