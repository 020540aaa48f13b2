"""A decorated function: step 1 of a call, and the ways of calling it.

In: a function and its options; later the call's arguments. Out: `RemoteCallable`, `JobSpec`; a
job's handle or value.
"""

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
    cast,
    overload,
)

from kinetic._client import coroutines, reloads
from kinetic._client.client import Client, client_of
from kinetic._client.options import OptionChanges, check_options, warn_of_spot
from kinetic._core import checks, spec
from kinetic._core.options import Options
from kinetic._core.spec import JobSpec
from kinetic._core.tracebacks import drop_frames, own_frames_hidden, waiting_hidden
from kinetic._pickling import origin
from kinetic.errors import UsageError, UsageTypeError

if TYPE_CHECKING:
    from types import TracebackType

    from kinetic._client.batch.handle import BatchHandle
    from kinetic._client.batch.launch import AtOnce, BatchOptions, Tags
    from kinetic._client.handle import JobHandle
    from kinetic._client.plan_view import PlanView

_DATA = "kinetic._datasets.data"
"""While this is not loaded there is no `Data` anywhere to be searched for."""

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
P2 = ParamSpec("P2")
R2 = TypeVar("R2")
First = TypeVar("First")


class RemoteCallable(Generic[P, R_co]):
    """A function that runs on an accelerator slice when it is called. As a class attribute it
    is a method.

    The value of an async function is what it returns once it is awaited.

    Within a job it is the plain function: a call runs its body there.
    """

    is_plain_in_jobs = True  # for `_pickling`

    def __init__(
        self, func: Callable[P, Any], options: Options, *, bound: tuple[Any, ...] = ()
    ) -> None:
        self._unbound: Any = func  # a classmethod keeps its kind
        if isinstance(func, classmethod | staticmethod):
            func = func.__func__
        if isinstance(func, RemoteCallable):
            raise UsageTypeError(
                f"{spec.name_of(func)} is decorated with @kinetic.run already: decorate it once."
            )
        spec.check_function(func)
        origin.see(func)
        is_function = inspect.isroutine(func)
        functools.update_wrapper(self, func, updated=("__dict__",) if is_function else ())
        if not hasattr(func, "__name__"):
            self.__name__ = self.__qualname__ = spec.name_of(func)
        self._func = func
        self._options, self._are_chosen = options, False
        self._bound = bound
        self._made_in = reloads.find_execution(self.__module__)

    @property
    def options(self) -> Options:
        """The options of the decorator."""
        self._catch_up()
        return self._options

    def _catch_up(self) -> None:
        """Become what the module makes of the function now, if it was executed again; options that
        were chosen stay."""
        found = reloads.find_successor(self, self._made_in)
        others = [] if found is None else reloads.find_namesakes(found)
        if found is None or any(each._func is not found._func for each in others):
            return
        kept = {"_bound": self._bound, "_are_chosen": self._are_chosen}
        if self._are_chosen or not all(each._are_chosen for each in others):
            kept["_options"] = self._options
        vars(self).update(vars(found) | kept)

    def _derive(self, options: Options, bound: tuple[Any, ...]) -> RemoteCallable[Any, Any]:
        func = self._func if bound else self._unbound
        made: RemoteCallable[Any, Any] = RemoteCallable(func, options, bound=bound)
        made._made_in = self._made_in
        made._are_chosen = self._are_chosen or options is not self._options
        return made

    if not TYPE_CHECKING:  # A type checker should report them.

        def __getattr__(self, name):
            why = f"a decorated function has no attribute {name!r}{spec.instead_of(name)}"
            raise AttributeError(why, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<RemoteCallable {self.__qualname__} on {self._options.topology.name}>"

    def with_options(self, **changes: Unpack[OptionChanges]) -> RemoteCallable[P, R_co]:
        """Return the same function with other options:
        `train.with_options(accelerator="tpu-v6e-16", timeout="1h")(steps)`.

        Takes the decorator's options, by name. An option that is given replaces the decorator's,
        `env=` as a whole too; the others stay.

        Raises:
            UsageError: an option cannot work.
        """
        with own_frames_hidden:
            options = check_options(self.options, changes)
        warn_of_spot(options)
        return self._derive(options, self._bound)

    # -- calling -----------------------------------------------------------------------------------

    @overload
    def __call__(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> R2: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the slice: print the leader's output as it arrives, return its value or raise what
        the function raised."""
        __tracebackhide__ = True  # Notebooks and pytest hide this frame.
        try:
            return self._call_or_submit(args, kwargs)
        except KeyboardInterrupt as interrupt:
            interrupt.__traceback__ = None
            raise
        except Exception as error:
            error.with_traceback(_without_ours(error.__traceback__))
            raise

    def _call_or_submit(self, args: Any, kwargs: Any) -> R_co:
        __tracebackhide__ = True
        from kinetic._config import settings

        if settings.on_host():
            value = self._body(args, kwargs)
            is_ours = inspect.iscoroutine(value) and not coroutines.is_loop_running()
            return cast("R_co", coroutines.run_coroutine(value) if is_ours else value)
        if self.options.debug:
            return self._call_debugged(args, kwargs)
        handle = self.run_async(*args, **kwargs)
        try:
            return handle.result(stream_logs=True)
        finally:
            if self._options.compile_check and handle.outcome() is not None:
                from kinetic._client.compiling import show_report

                show_report(handle.compile_report)

    def _call_debugged(self, args: Any, kwargs: Any) -> R_co:
        __tracebackhide__ = True
        from kinetic._client import debugging

        return cast("R_co", debugging.follow_call(lambda: self.run_async(*args, **kwargs)))

    @overload
    async def aio(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> R2: ...

    @overload
    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    async def aio(self, *args: Any, **kwargs: Any) -> Any:
        """Call from async code: `await train.aio(steps)` does what a call does, without blocking
        the asyncio event loop.

        Cancelling it leaves the job running and says how to come back to it.
        """
        __tracebackhide__ = True
        from kinetic._client import futures
        from kinetic._config import settings

        if settings.on_host():
            value = self._body(args, kwargs)
            return cast("R_co", await value if inspect.isawaitable(value) else value)
        if self.options.debug:
            return await futures.beside(lambda: self._call_debugged(args, kwargs), daemon=True)
        submit = functools.partial(self.run_async, *args, **kwargs)
        handle = await futures.beside(submit, late=lambda made: made.leave(), daemon=False)
        wait = functools.partial(handle.result, stream_logs=True)
        return await futures.beside(wait, abandoned=handle.leave, daemon=True)

    @overload
    def run_async(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> JobHandle[R2]: ...

    @overload
    def run_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R_co]: ...

    def run_async(self, *args: Any, **kwargs: Any) -> JobHandle[Any]:
        """Submit and return at once; the job runs independently of this process."""
        __tracebackhide__ = True
        with waiting_hidden:
            return self._submit_job(args, kwargs)

    def _check_place(self) -> None:
        """Jobs are submitted from where people work: a job submitted by a job would outlive it, and
        nobody would look after it."""
        self._catch_up()
        from kinetic._config import settings

        if settings.on_host():
            raise UsageError(
                f"A job cannot submit other jobs. In a job, {self.__name__}(...) runs the function "
                "right there, on this host; to run it elsewhere, submit it from the script that "
                "submitted this job."
            )

    def _submit_job(self, args: Any, kwargs: Any) -> JobHandle[R_co]:
        client = self._client(args, kwargs)
        client.warm_up(self._options)
        planned = client.plan_call(self._spec(args, kwargs))

        from kinetic._client import submission

        client.tell(planned.warnings)
        client.note_output(planned.plan.output_dir)
        if "kinetic._client.handle" not in sys.modules:
            threading.Thread(target=_import_handle, daemon=True).start()  # While the backend works.
        ref = submission.submit(planned, client.backend, client.store)
        try:
            from kinetic._client.handle import JobHandle

            return JobHandle(ref, client.backend, client.store)
        except KeyboardInterrupt as interrupt:
            submission.take_back(ref, client.backend, client.store, interrupt)
            raise

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
        """Submit a job for each input, and return at once; the source tree and the function are
        packaged once for all of them. Jobs get the inputs as they are now, whenever they are
        submitted.

        Args:
            inputs: one entry for each job.
            input_mode: "single" passes an entry as the only argument, "args" a list or tuple as
                positional arguments, "kwargs" a dict as keyword arguments; "auto" decides by the
                entry's type.
            max_concurrent: the most jobs that run at the same time; "auto" as many as there is room
                for (on this machine: processors and memory), None for all at once.
            retries: how often an input whose job failed is submitted again.
            fail_fast: submit nothing more after the first failure.
            cancel_running_on_fail: with `fail_fast`, also cancel the running jobs.
            name: as shown to users; by default the name of its jobs.
            tags: your own notes, a dict or a list of strings.
            project: the cluster's project, instead of the decorator's.
            cluster: the cluster, instead of the decorator's.

        Raises:
            UsageError: an input or an option cannot work, or the function cannot be pickled;
                nothing was submitted.
            PreflightError: the backend cannot take such jobs now; nothing was submitted.
        """
        from kinetic._client.batch import launch
        from kinetic._client.batch.inputs import calls

        with waiting_hidden:
            self._check_place()
            how = launch.rules(
                max_concurrent=max_concurrent,
                retries=retries,
                fail_fast=fail_fast,
                cancel_running_on_fail=cancel_running_on_fail,
            )
            title, notes, made = (
                checks.text("name", name) or self._options.name or self.__qualname__,
                launch.tags(tags),
                calls(inputs, input_mode),
            )
            for index, call in enumerate(made):
                self._check_call(call.args, call.kwargs, f"inputs[{index}]: ")
            elsewhere = {"project": project, "cluster": cluster}
            options = check_options(
                self._options,
                {name: value for name, value in elsewhere.items() if value is not None},
            )
            client = client_of(options)
            client.warm_up(options)
            func = functools.partial(self._func, *self._bound) if self._bound else self._func
            source = client.package_batch(JobSpec(func, (), {}, self.__qualname__, options), made)
            client.tell(source.warnings)
            return launch.launch(source, client.store, len(made), how, name=title, notes=notes)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> PlanView:
        """Return what a call would submit. Creates nothing."""
        from kinetic._client.plan_view import PlanView

        with waiting_hidden:
            client = self._client(args, kwargs)
            planned = client.plan_call(self._spec(args, kwargs))
            documents, files = (
                tuple(client.backend.render(planned.plan)),
                () if planned.bundle is None else planned.bundle.files(),
            )
            return PlanView(planned.plan, documents, planned.warnings, tuple(files))

    @overload
    def local(
        self: RemoteCallable[P2, Coroutine[Any, Any, R2]], *args: P2.args, **kwargs: P2.kwargs
    ) -> R2: ...

    @overload
    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body here, in this process. The function gets local data by its
        path."""
        value = self._body(args, kwargs)
        is_ours = inspect.iscoroutine(value)
        return cast("R_co", coroutines.run_coroutine(value) if is_ours else value)

    def _body(self, args: Any, kwargs: Any) -> Any:
        self._catch_up()
        if _DATA in sys.modules:
            from kinetic._datasets import call_data

            args, kwargs = call_data.localize(args), call_data.localize(kwargs)
        return self._func(*self._bound, *args, **kwargs)

    # -- being a method, being pickled -------------------------------------------------------------

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
        self._catch_up()
        if origin.is_found(self) and not origin.is_cloudpickle(sys._getframe(1)):
            return self.__qualname__
        # As the plain function, with the standard library only: the other side needs no kinetic.
        func = functools.partial(self._func, *self._bound) if self._bound else self._unbound
        return operator.itemgetter(0), ((func,),)

    def __copy__(self) -> RemoteCallable[P, R_co]:
        return self

    def __deepcopy__(self, memo: Any) -> RemoteCallable[P, R_co]:
        return self

    # -- inside ------------------------------------------------------------------------------------

    def _spec(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> JobSpec:
        return JobSpec(self._func, (*self._bound, *args), kwargs, self.__qualname__, self._options)

    def _client(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Client:
        self._check_place()
        self._check_call(args, kwargs)
        return client_of(self._options)

    def _check_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str = ""
    ) -> None:
        owner = origin.find_class_of(self) if not self._bound else None
        if owner is not None and not (
            args and isinstance(args[0], type) and issubclass(args[0], owner)
        ):
            raise UsageTypeError(
                f"{where}Put @kinetic.run above @classmethod: as it is, Python does not say on "
                f"which class {self.__qualname__} is called. Nothing was submitted."
            )
        try:
            # A decorator below this one may take other arguments than the function it wraps, but
            # `jax.jit` never does.
            signature = inspect.signature(
                self._func, follow_wrapped=not isinstance(self._func, FunctionType)
            )
        except (ValueError, TypeError):  # Some builtins have none; the host will check.
            return
        try:
            signature.bind(*self._bound, *args, **kwargs)
        except TypeError as error:
            why = spec.wrong_keyword(signature, kwargs) or error
            raise UsageTypeError(
                f"{where}{self.__name__}{signature}: {why}. Nothing was submitted."
            ) from None


def _import_handle() -> None:
    importlib.import_module("kinetic._client.handle")


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Drop kinetic's frames above the function's error; an error of kinetic itself keeps those
    below them."""
    from kinetic._client.handle import JobHandle

    passed = (
        RemoteCallable.__call__,
        RemoteCallable._call_or_submit,
        RemoteCallable._body,
        RemoteCallable.run_async,
        RemoteCallable.local,
        JobHandle.result,
    )
    return drop_frames(traceback, {function.__code__ for function in passed})
