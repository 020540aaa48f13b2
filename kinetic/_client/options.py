"""The decorator's options as users write them: types for type checkers, the documentation of
`help(kinetic.run)`, and which of them go together.

In: options by name. Out: `Options`, all valid, or the error that says which one to leave away; the
signature and the documentation of the table.
"""

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
    """What `with_options` takes: any of the decorator's options, by name. The decorator also takes
    those listed here by position, in this order."""

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
        before: the options of a decorated function; None for a function that is being decorated.
        arguments: options as users write them.

    Raises:
        UsageError: an option cannot work.
        UsageTypeError: ... because its value has the wrong type, or there is no such option.
    """
    unknown = next((name for name in arguments if name not in TABLE), None)
    if unknown is not None:
        raise UsageTypeError(_no_such_option(unknown))
    if arguments.get("volumes") is not None:
        from kinetic._datasets import call_data

        arguments = {**arguments, "volumes": call_data.volumes(arguments["volumes"])}
    elif "volumes" in arguments:
        arguments = {**arguments, "volumes": {}}
    topology = _topology(None if before is None else before.topology, arguments)
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
    """Warn that debugging on preemptible machines may be cut short."""
    import warnings

    if options.debug and options.topology.spot:
        text = (
            "debug=True on preemptible machines: the session ends when the machine is taken away."
        )
        warnings.warn(text, UserWarning, stacklevel=4)


def _topology(before: Topology | None, arguments: Mapping[str, Any]) -> Topology:
    from kinetic._core.accelerators.resolve import SPOT, resolve  # not needed on hosts

    spot = before is not None and before.spot
    if "spot" in arguments:
        spot = TABLE["spot"].check("spot", arguments["spot"])
    if "accelerator" in arguments:
        return resolve(arguments["accelerator"], spot=spot)
    name = TABLE["accelerator"].default if before is None else before.name.removesuffix(SPOT)
    return resolve(name, spot=spot)


REMOVED = {
    "survivors": "every attempt has new processes, on this machine as everywhere. Leave it away.",
}
"""Options that were removed, and what to do instead."""


def _no_such_option(name: str) -> str:
    if name in REMOVED:
        return f"@kinetic.run has no option {name!r} any more: {REMOVED[name]}"
    import difflib  # Only an error needs it.

    near = difflib.get_close_matches(name, TABLE, n=1)
    return f"@kinetic.run has no option {name!r}" + (f"; did you mean {near[0]}=?" if near else ".")


def document_options(function: Callable[..., Any]) -> None:
    """Give a function the table's signature and documentation: it takes some options by position,
    and all others as `**options`."""
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
    if function.__doc__ is not None:  # as with -OO
        words = "\n".join(_describe_option(parameter.name) for parameter in parameters)
        text = inspect.cleandoc(function.__doc__)  # as Python 3.13 does itself
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
    """Refuse options that contradict each other, or that do not suit the accelerator.

    Raises:
        UsageError: it names the options, and which of them to leave away.
    """
    if options.controller == "single":
        _check_pathways(options.topology)
    _check_elastic(options)
    _check_pods(options)
    _check_compile(options)
    both = next((name for name in options.secrets if name in options.env), None)
    if both is not None:
        raise UsageError(f"{both} is in env= and in secrets=: name it in one of them.")


def _check_elastic(options: Options) -> None:
    elastic = options.elastic
    if elastic is None:
        for name, value in _only_elastic(options).items():
            if value is not None:
                raise UsageError(
                    f"{name}= is for elastic jobs, which say how many slices they need at least "
                    "and at most: slices=(1, 2). Leave it away, or write slices= as two numbers."
                )
        return
    if options.retries and options.controller == "single":
        raise UsageError(
            'retries= begins a whole attempt anew, and one process with controller="single" and '
            "slices=(least, most) goes on instead: max_failures= says how often. Leave retries= "
            "away."
        )
    if options.controller == "single" and options.joins_jax == "program":
        raise UsageError(
            'A command reaches the slices of controller="single" by itself, and slices=(least, '
            "most) lets them come and go: run a Python script or module instead (without --), or "
            "give a fixed number of slices."
        )
    if options.start_wait_s is not None and options.controller == "single":
        raise UsageError(
            "start_wait= is about slices that come one by one, and one process with "
            'controller="single" starts with all of them: leave start_wait= away.'
        )
    if options.debug:
        raise UsageError(
            "debug=True does not go with slices=(least, most): a breakpoint would hold up the "
            "attempts after it as well. Debug with a fixed number of slices."
        )


def _check_compile(options: Options) -> None:
    if not options.compile_check:
        return
    name = options.topology.name
    if options.topology.kind != "tpu":
        raise UsageError(
            "compile_check= asks the compiler of the real slice, and only that of TPUs runs "
            f"without the chip: {name} is no TPU. Leave compile_check= away."
        )
    if options.elastic is not None or options.controller == "single":
        raise UsageError(
            "compile_check= compiles for a slice whose size is fixed, with a process on each host: "
            "leave it away, or give a number of slices and no controller=."
        )
    if options.joins_jax == "program":
        raise UsageError(
            "compile_check= looks at the programs of Python code that kinetic runs itself, and a "
            "command has processes of its own: run a script or a module (without --)."
        )


def _check_pods(options: Options) -> None:
    single = options.controller == "single"
    if options.reservation is not None and options.topology.spot:
        raise UsageError(
            "reservation= is for reserved machines, and spot=True for those that nobody has "
            "reserved: no machine is both. Leave one of them away."
        )
    if options.local_storage is not None and single:
        raise UsageError(
            "local_storage= is memory of the hosts that run the function, and with "
            'controller="single" none of them has the chips. Leave one of them away.'
        )
    if options.pathways_flags and not single:
        raise UsageError(
            "pathways_flags= is for the components that Pathways runs beside the function with "
            'controller="single". Leave it away, or add controller="single".'
        )
    if options.network_devices is None:
        return
    if single or options.most_slices == 1 or options.topology.kind != "tpu":
        which = 'controller="single"' if single else f"slices={options.slices}"
        raise UsageError(
            "network_devices= joins TPU slices whose hosts run the function, and this job has "
            f"{which} on {options.topology.name}. Leave it away."
        )


def _check_pathways(topology: Topology) -> None:
    from kinetic._core.accelerators.families import PATHWAYS_MACHINES  # not needed on hosts

    if topology.machine_type not in PATHWAYS_MACHINES:
        raise UsageError(
            f'controller="single" needs what Pathways runs on: v4, v5e, v5p, v6e or tpu7x, on '
            f"machines of 4 or 8 chips; {topology.name} is something else. Leave controller= "
            "away, or choose an accelerator such as tpu-v6e-16."
        )


def _only_elastic(options: Options) -> dict[str, object]:
    """The options of elastic jobs alone, by their public names."""
    return {
        "max_failures": options.max_failures,
        "slice_timeout": options.slice_timeout_s,
        "start_wait": options.start_wait_s,
        "on_slice_loss": options.on_slice_loss,
    }
