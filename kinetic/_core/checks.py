"""Checks of option values: one function for each kind of option.

In: the name of an option and the value as written. Out: the value to store, or an error that names
the option.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar, cast, get_args

from kinetic._core.place import ALL_DEVICES, BACKENDS, MULTI_TIER
from kinetic.errors import UsageError, UsageTypeError

Joins = bool | Literal["lazy", "program"]
"""The time at which the hosts join one JAX process group (its "world"); see `Options`."""
Comparison = bool | Literal["inputs", "strict"]
"""The comparison of the programs of hosts; see `Options`."""
Controller = Literal["single", "multi"]
"""The kind of controller: one process runs the function, or one per host; see `Options`."""
OnSliceLoss = Literal["wait", "shrink"]
"""The reaction of an elastic job to the loss of a slice; see `Options`."""
CONTROLLERS: tuple[Controller, ...] = get_args(Controller)
ON_SLICE_LOSS: tuple[OnSliceLoss, ...] = get_args(OnSliceLoss)
C = TypeVar("C", bound=str)
NetworkDevices = int | Literal["all"]
"""Number of network devices that a pod claims; see `Options`."""
COMPONENTS = ("server", "proxy-server", "worker")
"""Programs of Pathways, by their names in xpk: resource manager, proxy, a worker per machine."""
_DURATIONS = 'Write 90, "90s", "5m" or "1h30m"; None means no limit.'
_BUDGETS = 'Write 50, 12.5 or "$50"; None means no limit.'
_IN_CLUSTER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_RESERVATION = re.compile(r"projects/[a-z0-9.:-]+/reservations/[a-z0-9-]+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([MGT]i?)B?", re.ASCII)
_PROCESSORS = re.compile(r"\d+(\.\d{1,3})?|\d+m", re.ASCII)
"""https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/#meaning-of-cpu"""
_FLAG = re.compile(r"--[A-Za-z]\w*(=.*)?", re.ASCII | re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::\d+)?"
_IMAGE = re.compile(
    rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?"
    r"(?:@[A-Za-z][\w+.-]*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
"""https://github.com/distribution/reference"""


def text(name: str, value: object) -> str | None:
    """Check an optional string: it must not be empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageTypeError(f"{name} must be a string, or None; got {value!r}.")
    if not value.strip() or "\0" in value:
        raise UsageError(f"{name} must not be empty; leave it out to use the default.")
    return value


def name_text(name: str, value: object) -> str:
    """Check an optional display name; "" means none."""
    return text(name, value) or ""


def cluster_name(name: str, value: object) -> str | None:
    """Check the optional name of a cluster's object; the name becomes a label in the cluster."""
    cluster = text(name, value)
    if cluster is not None and not _IN_CLUSTER.fullmatch(cluster):
        raise UsageError(
            f"{name} may have at most 63 letters, digits, '.', '-' and '_', and must begin and end "
            f"with a letter or digit; got {cluster!r:.80}."
        )
    return cluster


def reservation(name: str, value: object) -> str | None:
    """Check an optional reservation: its name, or projects/PROJECT/reservations/NAME."""
    path = text(name, value)
    return path if path and _RESERVATION.fullmatch(path) else cluster_name(name, path)


def local_storage(name: str, value: object) -> str | None:
    """Check "multi-tier" or an optional size of memory, and return it as clusters write it."""
    storage = text(name, value)
    if storage in (None, MULTI_TIER):
        return storage
    return size(
        name,
        storage,
        f', or "{MULTI_TIER}"',
        "`kinetic checkpoint size` computes how much a model needs.",
    )


def size(name: str, value: object, other: str = "", advice: str = "") -> str | None:
    """Check an optional size of memory, and return it as clusters write it.

    Args:
        name: the option's name.
        value: the size as written, such as "60Gi".
        other: text about other values that the option takes, for the error.
        advice: how to find the size, for the error.
    """
    amount = text(name, value)
    if amount is None:
        return None
    written = _SIZE.fullmatch(amount)
    if written is None or not float(written[1]):
        raise UsageError(
            f'{name} must be a size with its unit, such as "60Gi" or "60000Mi"{other}; got '
            f"{amount!r:.80}. {advice}".rstrip()
        )
    return written[1] + written[2]


def processors(name: str, value: object) -> str | None:
    """Check an optional number of processors, and return it as clusters write it: "4", "500m"."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageTypeError(f"{name} must be a number of processors, such as 4; got {value!r}.")
    written = value.strip() if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")
    if not _PROCESSORS.fullmatch(written) or not float(written.removesuffix("m")):
        raise UsageError(
            f'{name} must be a number of processors, such as 4, 0.5 or "500m"; got {value!r:.80}.'
        )
    return written


def component_flags(name: str, value: object) -> dict[str, list[str]]:
    """Check flags for Pathways' components, and return a list of arguments for each component."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageTypeError(
            f'{name} must be a dict such as {{"proxy-server": {{"xla_flag": "true"}}}}; got '
            f"{value!r}."
        )
    unknown = next((each for each in value if each not in COMPONENTS), None)
    if unknown is not None:
        raise UsageError(
            f"{name}: Pathways has no component {unknown!r}. Components are: "
            f"{', '.join(COMPONENTS)}."
        )
    return {each: _split_arguments(f"{name}[{each!r}]", flags) for each, flags in value.items()}


def _split_arguments(name: str, flags: object) -> list[str]:
    """Return flags as a list of arguments; they are written as a dict, or as one shell line."""
    if isinstance(flags, str):
        import shlex  # Few jobs need it.

        try:
            arguments = shlex.split(flags)
        except ValueError as error:
            raise UsageError(
                f"{name} must be one line of flags, quoted as in a shell; got {flags!r:.80} "
                f"({error})."
            ) from None
    elif isinstance(flags, Mapping):
        arguments = [
            f"--{str(flag).removeprefix('--')}={str(v).lower() if isinstance(v, bool) else v}"
            for flag, v in flags.items()
        ]
    else:
        raise UsageTypeError(
            f'{name} must be a dict of flags and their values, or text such as "--flag=1"; got '
            f"{flags!r:.80}."
        )
    wrong = next((each for each in arguments if not _FLAG.fullmatch(each)), None)
    if wrong is not None or not _is_system_text("".join(arguments)):
        raise UsageError(f"{name} must consist of flags such as --flag=1; got {wrong!r:.80}.")
    return arguments


def network_devices(name: str, value: object) -> str | None:
    """Check an optional number of network devices, or "all"; return it as text."""
    if value is None or value == ALL_DEVICES:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():  # from a flag or variable
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f'{name} must be a number such as 2, or "all"; got {value!r}.')
    return str(count(name, value, least=1))


def image(name: str, value: object) -> str | None:
    """Check the name of an image, "bundled" or "prebuilt"."""
    checked = text(name, value)
    if checked is not None and not _IMAGE.fullmatch(checked):
        raise UsageError(
            f'{name} must be "bundled", "prebuilt" or an image as for `docker pull`, such as '
            '"us-docker.pkg.dev/project/repository/image:tag" (lower-case before the tag); got '
            f"{checked!r}."
        )
    return checked


def backend(name: str, value: object) -> str | None:
    """Check the name of a backend."""
    wanted = text(name, value)
    if wanted is not None and wanted not in BACKENDS:
        instead = ' Use "local", which simulates the same slice.' if wanted == "programs" else ""
        raise UsageError(
            f"There is no backend {wanted!r}. Backends are: {', '.join(BACKENDS)}.{instead}"
        )
    return wanted


def controller(name: str, value: object) -> Controller:
    """Check "single" or "multi", the kind of controller that runs the function."""
    return _choose(name, value, CONTROLLERS)


def _choose(name: str, value: object, choices: tuple[C, ...]) -> C:
    for choice in choices:
        if value == choice:
            return choice
    *others, last = (f'"{choice}"' for choice in choices)
    raise UsageError(f"{name} must be {', '.join(others)} or {last}; got {value!r}.")


def path_text(name: str, value: object) -> str | None:
    """Return an optional path or URI as text; `name` is the option in errors."""
    path = text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)
    if path is not None and not _is_system_text(path):
        raise UsageError(
            f"{name} must be a path without NUL characters or broken Unicode; got {path!r:.80}."
        )
    return path


def count(name: str, value: object, *, least: int) -> int:
    """Check a whole number that is not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{name} must be a whole number; got {value!r}.")
    if value < least:
        raise UsageError(f"{name} must be {least} or more; got {value}.")
    return value


def slices(name: str, value: object) -> int | tuple[int, int]:
    """Check a number of slices, or the least and the most slices of an elastic job."""
    if not isinstance(value, tuple | list | str):
        return count(name, value, least=1)
    if isinstance(value, str) or len(value) != 2:
        raise UsageTypeError(
            f"{name} must be a number, or the least and the most, as in (1, 2); got {value!r}."
        )
    least, most = (count(f"{name}[{index}]", each, least=1) for index, each in enumerate(value))
    is_flag = name.startswith("--")
    written, swapped = (
        f"{one}:{other}" if is_flag else f"({one}, {other})"
        for one, other in ((least, most), (most, least))
    )
    if least > most:
        raise UsageError(f"{name} takes the smaller number first: write {swapped}, not {written}.")
    if most == 1:
        raise UsageError(
            f"{name}={written} has no slice to lose: an elastic job needs two or more. Write "
            f"{name}=1 with {'--retries' if is_flag else 'retries='}, or a larger second number."
        )
    return least, most


def failures(name: str, value: object) -> int | None:
    """Check an optional number of failures."""
    return None if value is None else count(name, value, least=0)


def on_slice_loss(name: str, value: object) -> OnSliceLoss | None:
    """Check the optional reaction of an elastic job to the loss of a slice."""
    return None if value is None else _choose(name, value, ON_SLICE_LOSS)


def seconds(name: str, value: object) -> float | None:
    """Check an optional time limit, and return it in seconds."""
    if value is None:
        return None
    from kinetic._core.duration import in_seconds  # a process that only reads plans needs none

    try:
        duration = in_seconds(value)
    except ValueError:
        raise UsageError(
            f"{name} must be a duration above zero; got {value!r}. {_DURATIONS}"
        ) from None
    if duration is None:
        raise UsageTypeError(
            f"{name} must be a number of seconds, text or a timedelta; got {value!r}. {_DURATIONS}"
        )
    if not 0 < duration <= sys.float_info.max:  # also of NaN, and of numbers that no float can hold
        raise UsageError(
            f"{name} must be more than 0 seconds and finite; got {value}. None means no limit."
        )
    return float(duration)


def budget(name: str, value: object) -> float | None:
    """Check an optional amount of money, and return it in US dollars."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageTypeError(f"{name} must be a number or text; got {value!r}. {_BUDGETS}")
    try:
        dollars = float(value.strip().removeprefix("$") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name} must be an amount of dollars; got {value!r}. {_BUDGETS}"
        ) from None
    if not 0 < dollars <= sys.float_info.max:  # also of NaN
        raise UsageError(f"{name} must be more than 0 dollars and finite; got {value!r}.")
    return dollars


def switch(name: str, value: object) -> bool:
    """Check a boolean."""
    if not isinstance(value, bool):
        raise UsageTypeError(f"{name} must be True or False; got {value!r}.")
    return value


def optional_switch(name: str, value: object) -> bool | None:
    """Check a boolean, or None for no choice."""
    return None if value is None else switch(name, value)


def joins(name: str, value: object) -> Joins:
    """Check the option for when the hosts join one JAX process group."""
    if isinstance(value, bool) or (isinstance(value, str) and value in ("lazy", "program")):
        return cast("Joins", value)
    raise UsageTypeError(f'{name} must be "lazy", "program", True or False; got {value!r}.')


def comparison(name: str, value: object) -> Comparison:
    """Check the option for comparing the programs of hosts."""
    if isinstance(value, bool) or (isinstance(value, str) and value in ("inputs", "strict")):
        return cast("Comparison", value)
    raise UsageTypeError(f'{name} must be "inputs", "strict", True or False; got {value!r}.')


def variable(where: str, name: object) -> str:
    """Check the name of an environment variable; errors say that it is in `where`."""
    if not isinstance(name, str):
        raise UsageTypeError(f"The names of variables in {where} must be strings; got {name!r}.")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{where} must name environment variables, which have letters, digits and '_'; got "
            f"{name!r}."
        )
    return name


VARIABLE_BYTES = 131_072
"""Most bytes of a variable with its name: MAX_ARG_STRLEN of execve(2)."""
HOST_VARIABLES = frozenset(
    f"KINETIC_{name}"
    for name in (
        *("JOB_ID", "HOST_INDEX", "HOSTS", "ACCELERATOR", "ATTEMPT", "SLICE_INDEX", "OUTPUT_DIR"),
    )
) | {"PYTHONHOME", "PYTHONPLATLIBDIR"}
"""Variables that every host sets itself, and variables of the host's Python interpreter."""


def variables(name: str, value: object) -> dict[str, str]:
    """Check a dict of variables and their values."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageTypeError(f'{name} must be a dict such as {{"SEED": "1"}}; got {value!r}.')
    for key, content in value.items():
        if variable(name, key) in HOST_VARIABLES:
            option = "--output-dir" if name.startswith("--") else "output_dir="
            way = f"Use {option}." if key == "KINETIC_OUTPUT_DIR" else f"Remove {key}."
            raise UsageError(f"{name} cannot set {key}, because each host sets it. {way}")
        if not isinstance(content, str):
            raise UsageTypeError(
                f"{name}[{key!r}] must be a string; got {content!r}. Write {str(content)!r} "
                "instead."
            )
        if not _is_system_text(content):
            raise UsageError(
                f"{name}[{key!r}] must be text without NUL characters or broken Unicode; got "
                f"{content!r:.80}."
            )
        variable_size(f"{name}[{key!r}]", key, content)
    return dict(value)


def variable_size(where: str, name: str, value: str) -> None:
    """Refuse a variable that is so long that no program could be started with it."""
    size_bytes = len(f"{name}={value}".encode(errors="surrogateescape")) + 1
    if size_bytes > VARIABLE_BYTES:
        raise UsageError(
            f"{where} has {size_bytes:,} bytes, but Linux allows {VARIABLE_BYTES:,} in a variable. "
            "Put the value into a file or a secret manager, and read it in the function."
        )


def _is_system_text(text: str) -> bool:
    """True if the operating system accepts the text: no NUL and no unpaired surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def names(name: str, value: object) -> tuple[str, ...]:
    """Check a list of names of variables."""
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UsageTypeError(f'{name} must be a list of names such as ["HF_TOKEN"]; got {value!r}.')
    return tuple(dict.fromkeys(variable(name, each) for each in value))


def patterns(name: str, value: object) -> tuple[str, ...]:
    """Check a list of exact names of variables, and of prefixes that end in "*"."""
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UsageTypeError(f'{name} must be a list such as ["SEED", "WANDB_*"]; got {value!r}.')
    checked = tuple(value)
    for pattern in checked:
        if pattern != "*":
            variable(name, pattern.removesuffix("*") if isinstance(pattern, str) else pattern)
    return checked
