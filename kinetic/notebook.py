"""What is different in a notebook: cells have titles, and a display can change while its cell runs. The only door to IPython.

In: names of files, drawings. Out: titles of cells; a display in the running cell. Called by planning and handle. Nothing of
IPython is imported unless this process has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any


def kernel_shell() -> Any:
    """Return the shell of the kernel that this process is, or None."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def cell_title(file: str) -> str:
    """Return what people call the cell that this file name stands for: "Cell In[3]"; "" for other files."""
    if "IPython" not in sys.modules:
        return ""
    from IPython.core.getipython import get_ipython

    named = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    title = named(file) if named is not None else None
    return " ".join(title) if title else ""
