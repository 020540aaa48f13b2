"""The decorator's options as users write them: types for type checkers, and the documentation of
`help(kinetic.run)`.

In: options by name. Out: `Options`, all valid; the signature and the documentation of the table.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic._core import option_rules
from kinetic._core.options import FIELD_OF, TABLE, Keywords, Options
from kinetic.errors import UsageTypeError

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


def check_options(before: Options | None, given: Mapping[str, Any]) -> Options:
    """Return the options, updated with those that are given.

    Args:
        before: the options of a decorated function; None for a function that is being decorated.
        given: options as users write them.

    Raises:
        UsageError: an option cannot work.
        UsageTypeError: ... because its value has the wrong type, or there is no such option.
    """
    unknown = next((name for name in given if name not in TABLE), None)
    if unknown is not None:
        raise UsageTypeError(_no_such_option(unknown))
    if given.get("volumes") is not None:
        from kinetic._datasets import call_data

        given = {**given, "volumes": call_data.volumes(given["volumes"])}
    elif "volumes" in given:
        given = {**given, "volumes": {}}
    topology = _topology(None if before is None else before.topology, given)
    values = {
        FIELD_OF[name]: TABLE[name].check(name, value)
        for name, value in given.items()
        if name in FIELD_OF and name != "accelerator"
    }
    options = (
        Options(topology, **values)
        if before is None
        else replace(before, topology=topology, **values)
    )
    option_rules.check_together(options)
    return options


def warn_of_spot(options: Options) -> None:
    """Warn that debugging on preemptible machines may be cut short."""
    import warnings

    if options.debug and options.topology.spot:
        text = (
            "debug=True on preemptible machines: the session ends when the machine is taken away."
        )
        warnings.warn(text, UserWarning, stacklevel=3)


def _topology(before: Topology | None, given: Mapping[str, Any]) -> Topology:
    from kinetic._core.accelerators.resolve import SPOT, resolve  # not needed on hosts

    spot = before is not None and before.spot
    if "spot" in given:
        spot = TABLE["spot"].check("spot", given["spot"])
    if "accelerator" in given:
        return resolve(given["accelerator"], spot=spot)
    name = TABLE["accelerator"].default if before is None else before.name.removesuffix(SPOT)
    return resolve(name, spot=spot)


def _no_such_option(name: str) -> str:
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
