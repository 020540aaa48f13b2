"""`kinetic.kept`: what the calls of a session keep in their processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Kept(SimpleNamespace):
    """The namespace, whose error for a missing name says that nothing is kept under it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"nothing named {name!r} is kept: kinetic.kept is empty in the first call, and in "
            f"calls that are not kept (keep=True). Test with hasattr(kinetic.kept, {name!r}).",
            name=name,
            obj=self,
        )


kept = Kept()
"""A namespace for weights and data that the next call with `keep=True` on the same session finds.

In a call without `keep=True`, and after the session has formed again, it is empty.

Example:
    ```python
    kinetic.kept.step = getattr(kinetic.kept, "step", 0) + 1
    ```
"""
