"""`kinetic.kept`: what the calls of a session keep in their processes."""

from __future__ import annotations

from types import SimpleNamespace

kept = SimpleNamespace()
"""A namespace for weights and data that the next call with `keep=True` on the same session finds.

In a call without `keep=True`, and after the session has formed again, it is empty.

Example:
    ```python
    kinetic.kept.step = getattr(kinetic.kept, "step", 0) + 1
    ```
"""
