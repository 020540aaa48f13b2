"""Variables that take effect when a process starts, and never again.

A function's host is a process that runs before the function is known: what its loader, its C
library, its interpreter or a library's pool of threads reads must be there when it starts,
whichever backend starts it.
"""

from collections.abc import Mapping

LOADER_PATH = "LD_LIBRARY_PATH"
THREADS = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_")
READ_AT_START = ("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LANG", "LC_", "TZ", *THREADS)
"""The beginnings of their names."""
OF_THE_INTERPRETER = ("PYTHONHOME", "PYTHONPLATLIBDIR")
_OF_EACH_HOST = ("PYTHONPATH", *OF_THE_INTERPRETER)
"""A host imports kinetic by its own PYTHONPATH; it adds the folders of the job's."""


def select_start_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those with which the process of a host must be started."""
    names = [n for n in variables if n.startswith(READ_AT_START) and n not in _OF_EACH_HOST]
    return {name: variables[name] for name in names}
