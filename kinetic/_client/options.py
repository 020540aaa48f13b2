"""The decorator's options as users write them: their types, their documentation in
`help(kinetic.run)`, and checks of their combinations. An error names the option to remove."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic._core.options import FIELD_OF, TABLE, Keywords, Options
from kinetic.errors import UsageError, UsageTypeError

if TYPE_CHECKING:
    import os

    from kinetic._core.accelerators.topology import Topology
    from kinetic._datasets.data import Data


class OptionChanges(Keywords, total=False):
    """The options of `with_options`: all options of the decorator, by name. The options of this
    class, not those of its base, may also be given to the decorator by position, in this order."""

    accelerator: str
    container_image: str | None
    base_image_repo: str | None
    zone: str | None
    project: str | None
    capture_env_vars: Sequence[str] | None
    cluster: str | None
    backend: str | None
    namespace: str | None
    volumes: Mapping[str, Data] | None
    spot: bool
    output_dir: str | os.PathLike[str] | None
    debug: bool


def check_options(before: Options | None, arguments: Mapping[str, Any]) -> Options:
    """Return the options, updated with the arguments.

    Args:
        before: the options to update; None for a new decorator, which starts from the defaults.
        arguments: options as users write them.

    Raises:
        UsageError: an option is invalid, or does not go with another one.
        UsageTypeError: a value has the wrong type, or no option has this name.
    """
    unknown = next((name for name in arguments if name not in TABLE), None)
    if unknown is not None:
        raise UsageTypeError(_describe_unknown(unknown))
    if arguments.get("volumes") is not None:
        from kinetic._datasets import call_data

        arguments = {**arguments, "volumes": call_data.check_volumes(arguments["volumes"])}
    elif "volumes" in arguments:
        arguments = {**arguments, "volumes": {}}
    topology = _resolve_topology(None if before is None else before.topology, arguments)
    values = {
        FIELD_OF[name]: TABLE[name].check(name, value)
        for name, value in arguments.items()
        if name in FIELD_OF and name != "accelerator"
    }
    options = (
        Options(topology, **values)
        if before is None
        else replace(before, topology=topology, **values)
    )
    _check_together(options)
    return options


def warn_of_spot(options: Options) -> None:
    """Warn if debug=True is combined with preemptible machines."""
    import warnings

    if options.debug and options.topology.spot:
        text = "debug=True on preemptible machines: preemption ends the debugging session."
        warnings.warn(text, UserWarning, stacklevel=4)


def _resolve_topology(before: Topology | None, arguments: Mapping[str, Any]) -> Topology:
    from kinetic._core.accelerators.resolve import SPOT, resolve  # not needed on hosts

    spot = before is not None and before.spot
    if "spot" in arguments:
        spot = TABLE["spot"].check("spot", arguments["spot"])
    if "accelerator" in arguments:
        return resolve(arguments["accelerator"], spot=spot)
    name = TABLE["accelerator"].default if before is None else before.name.removesuffix(SPOT)
    return resolve(name, spot=spot)


def _describe_unknown(name: str) -> str:
    import difflib  # Only an error needs it.

    near = difflib.get_close_matches(name, TABLE, n=1)
    return f"@kinetic.run has no option {name!r}" + (f"; did you mean {near[0]}=?" if near else ".")


def document_options(function: Callable[..., Any]) -> None:
    """Give a function with `**options` the signature and the documentation of the option table, for
    `help()` and editors."""
    signature = inspect.signature(function)
    positional = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    by_name = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=TABLE[name].default,
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in Keywords.__annotations__.items()
    ]
    parameters = [*positional, *by_name]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    if function.__doc__ is not None:  # Python's -OO removes docstrings.
        words = "\n".join(_describe_option(parameter.name) for parameter in parameters)
        text = inspect.cleandoc(function.__doc__)  # Python 3.13 does this itself.
        function.__doc__ = text.replace("\nRaises:", f"\nArgs:\n{words}\n\nRaises:")


def _describe_option(name: str) -> str:
    return textwrap.fill(
        f"{name}: {TABLE[name].help}",
        width=100,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )


def _check_together(options: Options) -> None:
    """Refuse options that contradict each other or do not suit the accelerator.

    Raises:
        UsageError: the message names the options, and the one to remove.
    """
    if options.controller == "single":
        _check_pathways(options.topology)
    _check_elastic(options)
    _check_pods(options)
    _check_compile(options)
    both = next((name for name in options.secrets if name in options.env), None)
    if both is not None:
        raise UsageError(
            f"The variable {both} is in both env= and secrets=. Remove it from one of the two."
        )


def _check_elastic(options: Options) -> None:
    elastic = options.elastic
    if elastic is None:
        for name, value in _list_elastic_only(options).items():
            if value is not None:
                raise UsageError(
                    f"{name}= is for elastic jobs, whose slices= has two numbers, the least and "
                    f"the most: slices=(1, 2). Remove {name}=, or make the job elastic."
                )
        return
    if options.retries and options.controller == "single":
        raise UsageError(
            'retries= does not work with controller="single" and slices=(least, most): such a job '
            "keeps its process after a failure, and begins no new attempt. Remove retries=, and "
            "use max_failures= to limit the failures."
        )
    if options.controller == "single" and options.joins_jax == "program":
        raise UsageError(
            'slices=(least, most) with controller="single" needs Python code that kinetic runs '
            "itself, not a command. Run a Python script or module (without --), or give a fixed "
            "number of slices."
        )
    if options.start_wait_s is not None and options.controller == "single":
        raise UsageError(
            "start_wait= is the wait for slices that start one by one, but with "
            'controller="single" all slices start together. Remove start_wait=.'
        )
    if options.debug:
        raise UsageError(
            "debug=True does not work with slices=(least, most): a breakpoint would also delay "
            "later attempts. Debug with a fixed number of slices."
        )


def _check_compile(options: Options) -> None:
    if not options.compile_check:
        return
    name = options.topology.name
    if options.topology.kind != "tpu":
        raise UsageError(
            "compile_check= works only for TPUs, whose compiler runs without the chip; "
            f"{name} is not a TPU. Remove compile_check=."
        )
    if options.elastic is not None or options.controller == "single":
        raise UsageError(
            "compile_check= does not work for elastic jobs or with a single controller. Remove "
            "compile_check=, or give slices= as one number and no controller=."
        )
    if options.joins_jax == "program":
        raise UsageError(
            "compile_check= works for Python code that kinetic runs itself, not for a command with "
            "processes of its own. Run a script or a module (without --)."
        )


def _check_pods(options: Options) -> None:
    single = options.controller == "single"
    if options.reservation is not None and options.topology.spot:
        raise UsageError(
            "reservation= and spot=True contradict each other: a spot machine cannot be reserved. "
            "Remove one of them."
        )
    if options.local_storage is not None and single:
        raise UsageError(
            "local_storage= is memory of hosts that both run the function and have chips, and with "
            'controller="single" no host does both. Remove one of these two options.'
        )
    if options.pathways_flags and not single:
        raise UsageError(
            "pathways_flags= is for the Pathways processes of a job with "
            'controller="single". Remove pathways_flags=, or add controller="single".'
        )
    if options.network_devices is None:
        return
    if single or options.most_slices == 1 or options.topology.kind != "tpu":
        shape = 'controller="single"' if single else f"slices={options.slices}"
        raise UsageError(
            "network_devices= is for jobs with several TPU slices whose hosts run the function; "
            f"this job has {shape} on {options.topology.name}. Remove network_devices=."
        )


def _check_pathways(topology: Topology) -> None:
    from kinetic._core.accelerators.families import PATHWAYS_MACHINES  # not needed on hosts

    if topology.machine_type not in PATHWAYS_MACHINES:
        raise UsageError(
            'controller="single" needs an accelerator that Pathways supports: v4, v5e, v5p, v6e or '
            f"tpu7x, on machines with 4 or 8 chips. {topology.name} is none of these: remove "
            "controller=, or choose an accelerator such as tpu-v6e-16."
        )


def _list_elastic_only(options: Options) -> dict[str, object]:
    """Return the options that only elastic jobs have, by their public names."""
    return {
        "max_failures": options.max_failures,
        "slice_timeout": options.slice_timeout_s,
        "start_wait": options.start_wait_s,
        "on_slice_loss": options.on_slice_loss,
    }
