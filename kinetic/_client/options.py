"""The decorator's options: what each takes, and how it is checked. One table for `kinetic.run` and
`with_options`.

In: options as users write them. Out: `Options`, all valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from kinetic._core import spec
from kinetic._core.accelerators.resolve import SPOT, resolve
from kinetic._core.accelerators.topology import Topology
from kinetic._core.duration import Duration
from kinetic._core.spec import Joins, Options
from kinetic.errors import UsageError, UsageTypeError

if TYPE_CHECKING:
    import os

    from kinetic._datasets.data import Data


class Changes(TypedDict, total=False):
    """What `with_options` takes: any of the decorator's options, by name."""

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
    name: str | None
    slices: int
    timeout: Duration | None
    start_timeout: Duration | None
    hang_timeout: Duration | None
    retries: int
    env: Mapping[str, str] | None
    secrets: Sequence[str] | None
    all_hosts: bool
    joins_jax: Joins


def checked(before: Options | None, given: Mapping[str, Any]) -> Options:
    """Return the options with what was given in place of what was there.

    Args:
        before: the options of a decorated function; None for a function that is being decorated.
        given: options as users write them; those of the decorator all have a value.

    Raises:
        UsageError: an option cannot work.
        UsageTypeError: ... because its value has the wrong type, or there is no such option.
    """
    unknown = [name for name in given if name not in Changes.__annotations__]
    if unknown:
        raise UsageTypeError(_no_such_option(unknown[0]))
    topology = _topology(None if before is None else before.topology, given)
    fields = {
        _FIELDS.get(name, name): check(given[name])
        for name, check in _CHECKS.items()
        if name in given
    }
    options = (
        Options(topology, **fields)
        if before is None
        else replace(before, topology=topology, **fields)
    )
    spec.check_slices(topology, options.slices)
    both = [name for name in options.secrets if name in options.env]
    if both:
        raise UsageError(f"{both[0]} is in env= and in secrets=: name it in one of them.")
    return options


def _topology(before: Topology | None, given: Mapping[str, Any]) -> Topology:
    spot = (
        spec.switch("spot", given["spot"])
        if "spot" in given
        else before is not None and before.spot
    )
    if before is None or "accelerator" in given:
        return resolve(given["accelerator"], spot=spot)
    return resolve(before.name.removesuffix(SPOT), spot=spot)


def _no_such_option(name: str) -> str:
    import difflib  # Only an error needs it.

    near = difflib.get_close_matches(name, Changes.__annotations__, n=1)
    return f"@kinetic.run has no option {name!r}" + (f"; did you mean {near[0]}=?" if near else ".")


def _backend(name: object) -> str | None:
    from kinetic._backends import registry

    return registry.check(spec.text("backend", name))


def _volumes(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    from kinetic._datasets import attach

    return attach.volumes(value)


def _named(check: Callable[[str, object], Any], name: str) -> Callable[[object], Any]:
    return lambda value: check(name, value)


_FIELDS = {name: f"{name}_s" for name in ("timeout", "start_timeout", "hang_timeout")}
"""Where an option and its field have different names."""
_CHECKS: dict[str, Callable[[object], Any]] = {
    "slices": lambda value: spec.count("slices", value, least=1),
    "backend": _backend,
    **{
        name: _named(spec.text, name)
        for name in (
            "project",
            "zone",
            "cluster",
            "namespace",
            "container_image",
            "base_image_repo",
        )
    },
    "capture_env_vars": spec.patterns,
    "env": spec.variables,
    "secrets": _named(spec.names, "secrets"),
    "volumes": _volumes,
    "output_dir": _named(spec.path_text, "output_dir"),
    "name": lambda value: spec.text("name", value) or "",
    **{name: _named(spec.seconds, name) for name in _FIELDS},
    "retries": lambda value: spec.count("retries", value, least=0),
    "debug": _named(spec.switch, "debug"),
    "all_hosts": _named(spec.switch, "all_hosts"),
    "joins_jax": _named(spec.joins, "joins_jax"),
}
