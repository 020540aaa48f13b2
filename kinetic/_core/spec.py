"""What the caller asked for: the function, its arguments and the options of the decorator, checked.

In: arguments of `kinetic.run` as written. Out: `Options` and `JobSpec`, frozen values.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal, cast

from kinetic._core.accelerators.topology import Topology
from kinetic._core.duration import in_seconds
from kinetic.errors import UsageError, UsageTypeError

Joins = bool | Literal["lazy", "program"]
"""When the hosts join to one world of JAX; see `Plan`."""
_DURATIONS = 'Write 90, "90s", "5m" or "1h30m"; None means no limit.'
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Options:
    """The options of one decorated function, all valid.

    Attributes:
        topology: shape of each slice.
        slices: number of slices; more than one only of one host each.
        backend: as asked for; None lets the accelerator decide.
        project, zone, cluster, namespace: of a cluster; None for what the settings say.
        container_image, base_image_repo: what hosts of a cluster run.
        capture_env_vars: names and prefixes of variables to copy from the caller.
        env: variables set for the function.
        secrets: names of variables whose values travel apart from the plan.
        volumes: data at fixed paths: `kinetic.Data` by absolute path.
        output_dir: where the function leaves files; None for what the settings say.
        name: what people see; "" for the function's own.
        timeout_s, start_timeout_s, hang_timeout_s: limits; None for none, or for what the settings
        say.
        retries: how many times a failed gang is restarted.
        debug: whether the leader waits for a debugger.
        all_hosts: whether the values of all hosts are kept, not only the leader's.
        joins_jax: when the hosts join to one world of JAX; see `Plan`.
    """

    topology: Topology
    slices: int = 1
    backend: str | None = None
    project: str | None = None
    zone: str | None = None
    cluster: str | None = None
    namespace: str | None = None
    container_image: str | None = None
    base_image_repo: str | None = None
    capture_env_vars: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    volumes: Mapping[str, Any] = field(default_factory=dict)
    output_dir: str | None = None
    name: str = ""
    timeout_s: float | None = None
    start_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    retries: int = 0
    debug: bool = False
    all_hosts: bool = False
    joins_jax: Joins = "lazy"


@dataclass(frozen=True)
class JobSpec:
    """One call: what to run, with what, and how.

    Attributes:
        func: the undecorated function.
        args, kwargs: of the call; a method's instance comes first.
        name: the function's qualified name.
        options: of the decorator.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    options: Options


def text(name: str, value: object) -> str | None:
    """Check an optional string that is not empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageTypeError(f"{name} must be a string, or None; it is {value!r}.")
    if not value.strip() or "\0" in value:
        raise UsageError(f"{name} must not be empty; leave it out to use the default.")
    return value


def path_text(name: str, value: object) -> str | None:
    """Check an optional path or URI."""
    path = text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)
    if path is not None and not _is_system_text(path):
        raise UsageError(f"{name} is not a path: {path!r:.80} contains a NUL or half a character.")
    return path


def count(name: str, value: object, *, least: int) -> int:
    """Check a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{name} must be a whole number; it is {value!r}.")
    if value < least:
        raise UsageError(f"{name} must be {least} or more; it is {value}.")
    return value


def check_slices(topology: Topology, slices: int) -> None:
    """Check that there can be so many slices of this shape: several only of one host each, in this
    version."""
    if slices > 1 and topology.multi_host:
        raise UsageError(
            f"slices={slices} joins machines of one host each, such as cpu:2 or gpu-h100x8; a "
            f"slice of {topology.name} has {topology.hosts} hosts, and several of those arrive "
            "with elastic training. Choose a larger accelerator."
        )


def seconds(name: str, value: object) -> float | None:
    """Check an optional time limit, and return it in seconds."""
    if value is None:
        return None
    try:
        found = in_seconds(value)
    except ValueError:
        raise UsageError(f"{name}: {value!r} is not a length of time. {_DURATIONS}") from None
    if found is None:
        raise UsageTypeError(
            f"{name} must be a number of seconds, text or a timedelta; it is {value!r}. "
            f"{_DURATIONS}"
        )
    if not 0 < found <= sys.float_info.max:  # also of NaN, and of numbers that no float can hold
        raise UsageError(
            f"{name} must be more than 0 seconds and finite; it is {value}. None means no limit."
        )
    return float(found)


def switch(name: str, value: object) -> bool:
    """Check a boolean."""
    if not isinstance(value, bool):
        raise UsageTypeError(f"{name} must be True or False; it is {value!r}.")
    return value


def joins(name: str, value: object) -> Joins:
    """Check when the hosts join."""
    if isinstance(value, bool) or (isinstance(value, str) and value in ("lazy", "program")):
        return cast("Joins", value)
    raise UsageTypeError(f'{name} must be "lazy", "program", True or False; it is {value!r}.')


def variable(where: str, name: object) -> str:
    """Check the name of an environment variable."""
    if not isinstance(name, str):
        raise UsageTypeError(f"{where} names variables with strings, and {name!r} is not a string.")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}: {name!r} cannot be the name of an environment variable (letters, digits and "
            "_)."
        )
    return name


def variables(value: object) -> dict[str, str]:
    """Check `env`: a dict of names and string values."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageTypeError(f'env must be a dict such as {{"SEED": "1"}}; it is {value!r}.')
    for name, content in value.items():
        variable("env", name)
        if not isinstance(content, str):
            raise UsageTypeError(
                f"env[{name!r}] must be a string; it is {content!r}. Write {str(content)!r}."
            )
        if not _is_system_text(content):
            raise UsageError(
                f"env[{name!r}] contains a NUL or half a character, which no environment can hold: "
                f"{content!r:.80}."
            )
    return dict(value)


def _is_system_text(text: str) -> bool:
    """Whether the operating system takes it: surrogates stand for bytes that are no text, or for
    nothing."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def names(where: str, value: object) -> tuple[str, ...]:
    """Check a list of variables' names."""
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UsageTypeError(
            f'{where} must be a list of names such as ["HF_TOKEN"]; it is {value!r}.'
        )
    return tuple(dict.fromkeys(variable(where, name) for name in value))


def patterns(value: object) -> tuple[str, ...]:
    """Check `capture_env_vars`: a list of exact names and of prefixes that end in "*"."""
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UsageTypeError(
            f'capture_env_vars must be a list such as ["SEED", "WANDB_*"]; it is {value!r}.'
        )
    checked = tuple(value)
    for pattern in checked:
        if pattern != "*":
            variable(
                "capture_env_vars",
                pattern.removesuffix("*") if isinstance(pattern, str) else pattern,
            )
    return checked


def check_function(func: Any) -> None:
    """Refuse what cannot run on a host, with the way out."""
    if isinstance(func, classmethod | staticmethod):
        kind = type(func).__name__
        raise UsageTypeError(
            f"@kinetic.run cannot take a {kind} object: put @{kind} above @kinetic.run, not below "
            "it."
        )
    if hasattr(func, "cache_clear") and hasattr(func, "cache_info"):
        raise UsageTypeError(
            "@kinetic.run cannot take a cached function: its cache stays here. Put @lru_cache "
            "above @kinetic.run."
        )
    if not callable(func):
        raise UsageTypeError(f"@kinetic.run takes a function; {func!r} cannot be called.")
    body = (
        func
        if inspect.isroutine(func) or isinstance(func, functools.partial | type)
        else type(func).__call__
    )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise UsageTypeError(
            f"{name_of(func)} is a generator, and a generator cannot be brought back: return a "
            "list."
        )


def name_of(func: Any) -> str:
    """Return what people call a function, also one that has no name of its own."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, MethodType):
        func = func.__func__
    return str(getattr(func, "__qualname__", None) or type(func).__qualname__)
