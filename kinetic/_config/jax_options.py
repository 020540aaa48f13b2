"""Options of JAX that the caller has set, to be set on the hosts as well.

In: JAX, if this process has imported it. Out: names and values that differ from JAX's defaults.

`jax.config.update("jax_enable_x64", True)` at the top of a script is not part of a function:
without this, the function would compute in float32 on the hosts. Options that say where and on what
JAX runs are left to the host.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kinetic._config import settings

Value = bool | int | float | str | None

_log = logging.getLogger("kinetic.config")
_OF_THE_HOST = (
    *(
        "platform",
        "device",
        "backend",
        "topology",
        "coordinator",
        "preemption",
        "proxy",
        "distributed",
        "mock",
        "cross_host",
    ),
    *("collectives", "pjrt", "visible", "recoverability", "logging", "debug_log"),
)
_READ = """
import json, sys, jax
plain = {name: getattr(value, "value", value) for name, value in jax.config.values.items()}
plain = {
    name: value
    for name, value in plain.items()
    if isinstance(value, bool | int | float | str | None)
}
json.dump(plain, sys.stdout)
"""
_LIMIT_S = 60.0
_IF_UNKNOWN: Mapping[str, Value] = {"jax_enable_x64": False}
_KNOWN: dict[str, Mapping[str, Value]] = {}
"""The defaults, by version."""


def changed_options(cache_dir: Path, *, without: Mapping[str, str]) -> dict[str, Value]:
    """Return the options of JAX that differ from its defaults.

    Args:
        cache_dir: the user's cache folder, which keeps the defaults of each version of JAX.
        without: variables of the job; an option that one of them sets (`JAX_ENABLE_X64`) is left
            out.
    """
    jax = sys.modules.get("jax")
    values = getattr(getattr(jax, "config", None), "values", None)
    if not isinstance(values, dict):
        return {}
    defaults = _defaults(str(getattr(jax, "__version__", "")), cache_dir)
    # The value of an enumeration, which JAX accepts too.
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    differ = {
        name: value for name, value in plain.items() if name in defaults and value != defaults[name]
    }
    return {
        name: value
        for name, value in differ.items()
        if name.upper() not in without and not _is_of_the_host(name)
    }


def _is_of_the_host(name: str) -> bool:
    return any(part in name for part in _OF_THE_HOST)


def _defaults(version: str, cache_dir: Path) -> Mapping[str, Value]:
    """Return the defaults of this version of JAX, from a fresh process, once: JAX itself keeps only
    current values."""
    if version not in _KNOWN:
        _KNOWN[version] = _read_defaults(version, cache_dir)
    return _KNOWN[version]


def _read_defaults(version: str, cache_dir: Path) -> Mapping[str, Value]:
    place = cache_dir / f"jax-{version}-defaults.json"
    with suppress(OSError, ValueError):
        known = json.loads(place.read_text())
        if isinstance(known, dict):
            return known
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _READ],
            env=settings.environ_without("JAX_"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=True,
        )
        found = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.debug("the defaults of JAX %s could not be read: %s", version, error)
        return _IF_UNKNOWN
    with suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = place.with_name(f"{place.name}.{os.getpid()}")
        temporary.write_text(json.dumps(found))
        temporary.replace(place)
    return found if isinstance(found, dict) else _IF_UNKNOWN
