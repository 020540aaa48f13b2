"""The decorator's options as users write them: types for type checkers, and the documentation of
`help(kinetic.run)`.

In: options by name. Out: `Options`, all valid; the signature and the documentation of the table.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinetic._core import options as table
from kinetic._core.options import TABLE, Keywords, Options

if TYPE_CHECKING:
    import os

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
    """Return the options, updated with those that are given; see
    `_core.options.check_options`."""
    if given.get("volumes") is not None:
        from kinetic._datasets import call_data

        given = {**given, "volumes": call_data.volumes(given["volumes"])}
    elif "volumes" in given:
        given = {**given, "volumes": {}}
    return table.check_options(before, given)


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
