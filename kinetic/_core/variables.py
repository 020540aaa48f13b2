"""Kinds of environment variables, by name: those read when a process starts, and secrets.

The process of a host runs before it knows its function. Variables that its loader, its C library,
its interpreter or a library's thread pool reads must be set when any backend starts the process.
"""

import re
from collections.abc import Mapping

LOADER_PATH = "LD_LIBRARY_PATH"
THREADS = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_")
READ_AT_START = ("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", *THREADS)
"""Prefixes of variables that are read when a process starts."""
_HOST_ONLY_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR")
"""Variables that a host sets itself. It needs its own PYTHONPATH to import kinetic, and adds the
folders of the job's PYTHONPATH to sys.path later."""
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSWORD|CREDENTIAL", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """True if a variable of this name is likely to hold a secret."""
    return _SECRET.search(name) is not None


def select_start_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the process of a host must start. Secrets are left out,
    because others can read the environment of a process."""
    return {
        name: value
        for name, value in variables.items()
        if (name.startswith(READ_AT_START) or name in ("LANG", "LANGUAGE", "TZ"))
        and not (name in _HOST_ONLY_VARIABLES or looks_secret(name))
    }
