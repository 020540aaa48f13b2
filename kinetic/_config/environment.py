"""Variables that leave the caller's environment: captured ones, secrets, and those that a local
host inherits.

In: patterns or names, and an environment. Out: dicts of variables. Pure, except that it logs the
names of captured variables, and never their values.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kinetic._core.variables import looks_secret
from kinetic.errors import UsageError

if TYPE_CHECKING:
    import logging


_MACHINE_VARIABLES = """
    PATH HOME PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV SHELL
    TMPDIR TEMP TMP HOSTNAME USER LOGNAME SSH_AUTH_SOCK KUBERNETES_SERVICE_HOST KERAS_BACKEND
"""
_PROCESS_VARIABLES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP TERM COLUMNS LINES
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME PYTHONPATH PYTHONHOME PYTHONUTF8
    PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX LD_LIBRARY_PATH
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    CURL_CA_BUNDLE
    GOOGLE_APPLICATION_CREDENTIALS CLOUDSDK_CONFIG STORAGE_EMULATOR_HOST HF_ENDPOINT HF_HOME
"""
"""Variables that any process needs. The last lines list variables for access to buckets and hubs:
they may hold the path of a file with credentials, but never the credentials themselves."""
MACHINE_BOUND = frozenset(_MACHINE_VARIABLES.split())
"""Variables that describe this machine. Only an exact name captures them, no prefix with "*"."""
_INHERITED = frozenset(_PROCESS_VARIABLES.split())
_HOST_VARIABLES = frozenset(
    [
        "KINETIC_HOST_ADDRESS",
        "KINETIC_ROLE",
        "KINETIC_SIMULATED",
        "KINETIC_SLICES",
    ]
)
"""Variables that hosts set; they do not count as misspelt names of settings."""
_ALIKE = 0.85
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})


def select_env_vars(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `names` selects. Variables that are not set are left out.

    The names of captured variables are logged, and a warning lists names that look like secrets. An
    exact name selects any variable; a prefix that ends in "*" skips variables that describe this
    machine or the job.

    Raises:
        UsageError: an entry of `names` is neither a name nor a prefix.
    """
    from kinetic._core import (
        checks,  # Most calls capture nothing, and need neither this module nor logging.
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
        "kinetic: capture_env_vars= matches variables that look like secrets: %s. They are sent as "
        "secrets, so they are not stored. If the job does not need them, narrow the pattern.",
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
        UsageError: a named secret is not set.
    """
    missing = [name for name in names if name not in environ]
    if missing:
        raise UsageError(
            f"The environment variable {missing[0]}, which secrets= names, is not set. Export it, "
            "or remove it from secrets=."
        )
    return {name: environ[name] for name in names}


def inherited_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a host on this machine inherits: those that any process needs,
    except those that could be a secret."""
    return {
        name: value
        for name, value in environ.items()
        if name in _INHERITED or name.startswith("LC_") or name.lower() in _PROXIES
    }


def find_misspelt(variables: Collection[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment's variables whose names are probably misspelt, each with the name in
    `variables` that it resembles."""
    import difflib

    others = set(environ) - {*variables} - _HOST_VARIABLES
    near = {
        name: difflib.get_close_matches(name.upper(), list(variables), n=1, cutoff=_ALIKE)
        for name in sorted(others)
        if name.upper().startswith("KIN")
    }
    return {name: matches[0] for name, matches in near.items() if matches}
