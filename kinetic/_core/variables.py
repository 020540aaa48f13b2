"""What the names of variables tell: which take effect when a process starts, which are secret.

A function's host is a process that runs before the function is known: what its loader, its C
library, its interpreter or a library's pool of threads reads must be there when it starts,
whichever backend starts it.
"""

import re
from collections.abc import Mapping

LOADER_PATH = "LD_LIBRARY_PATH"
THREADS = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_")
READ_AT_START = ("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", *THREADS)
"""The beginnings of their names."""
_OF_EACH_HOST = ("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR")
"""A host imports kinetic by its own PYTHONPATH; it adds the folders of the job's."""
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSWORD|CREDENTIAL", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    return _SECRET.search(name) is not None


def select_start_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those with which the process of a host must be started; no secrets, because others
    can read the environment of a process."""
    return {
        name: value
        for name, value in variables.items()
        if (name.startswith(READ_AT_START) or name in ("LANG", "LANGUAGE", "TZ"))
        and not (name in _OF_EACH_HOST or looks_secret(name))
    }
