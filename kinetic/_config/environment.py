"""What leaves the caller's environment: captured variables, secrets, and what a local host
inherits.

In: patterns or names, and an environment. Out: dicts of variables. Pure, except that it logs the
names, never the values, of what was captured.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kinetic._core.variables import looks_secret
from kinetic.errors import UsageError

if TYPE_CHECKING:
    import logging


_OF_THIS_MACHINE = """
    PATH HOME PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV SHELL
    TMPDIR TEMP TMP HOSTNAME USER LOGNAME SSH_AUTH_SOCK KUBERNETES_SERVICE_HOST KERAS_BACKEND
"""
_OF_ANY_PROCESS = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP TERM COLUMNS LINES
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME PYTHONPATH PYTHONHOME PYTHONUTF8
    PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX LD_LIBRARY_PATH
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    CURL_CA_BUNDLE
    GOOGLE_APPLICATION_CREDENTIALS CLOUDSDK_CONFIG STORAGE_EMULATOR_HOST HF_ENDPOINT HF_HOME
"""
"""The last lines are how a bucket or a hub is reached: of credentials, only the file's path."""
MACHINE_BOUND = frozenset(_OF_THIS_MACHINE.split())
"""Variables that a wildcard never captures: they describe this machine. An exact name does capture
them."""
_INHERITED = frozenset(_OF_ANY_PROCESS.split())
_OF_HOSTS = frozenset(
    [
        "KINETIC_HOST_ADDRESS",
        "KINETIC_ROLE",
        "KINETIC_SIMULATED",
        "KINETIC_SLICES",
    ]
)
"""Variables of hosts that look like those of settings."""
_ALIKE = 0.85
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})


def select_env_vars(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `names` selects; missing ones are silently left out.

    Their names are logged, and a warning names those that look like secrets. An exact name takes
    any variable; a prefix that ends in "*" skips those that describe this machine or the job.

    Raises:
        UsageError: an entry of `names` is neither a name nor a prefix.
    """
    from kinetic._core import (
        checks,  # like logging, imported only where something is captured
    )

    captured: dict[str, str] = {}
    for pattern in checks.patterns("capture_env_vars", names):
        captured |= _match_vars(pattern, environ)
    if captured:
        _log().info("captured environment variables: %s", ", ".join(sorted(captured)))
    suspicious = sorted(filter(looks_secret, captured))
    if suspicious:
        _warn_once(", ".join(suspicious))
    return captured


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("kinetic.config")


@functools.cache
def _warn_once(names: str) -> None:
    _log().warning(
        "kinetic: capture_env_vars takes what looks like a secret (%s): it is sent apart from the "
        "plan, as with secrets=[...].",
        names,
    )


def _match_vars(pattern: str, env: Mapping[str, str]) -> dict[str, str]:
    if not pattern.endswith("*"):
        return {pattern: env[pattern]} if pattern in env else {}
    from kinetic._core.checks import HOST_VARIABLES

    skipped, prefix = MACHINE_BOUND | HOST_VARIABLES, pattern[:-1]
    return {k: v for k, v in env.items() if k.startswith(prefix) and k not in skipped}


def secret_values(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the named secrets.

    Raises:
        UsageError: one of them is not set.
    """
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"The secret {missing[0]} is not set in this environment. Export it, or take it out of "
            "secrets=."
        )
    return {name: environ[name] for name in names}


def inherited_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a host on this machine inherits: what a process needs to run here, and nothing
    that could be a secret."""
    return {
        name: value
        for name, value in environ.items()
        if name in _INHERITED or name.startswith("LC_") or name.lower() in _PROXIES
    }


def find_misspelt(variables: Collection[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that nothing reads, each with the one of `known` that it looks like."""
    import difflib

    others = set(environ) - {*variables} - _OF_HOSTS
    near = {
        name: difflib.get_close_matches(name.upper(), list(variables), n=1, cutoff=_ALIKE)
        for name in sorted(others)
        if name.upper().startswith("KIN")
    }
    return {name: matches[0] for name, matches in near.items() if matches}
