"""Credentials of a cloud, under the name by which scripts import it or switch it off.

In: nothing. Out: nothing.
"""

from __future__ import annotations

__all__ = ["ensure_credentials", "invalidate_credential_cache"]


def ensure_credentials(project: str, zone: str, cluster: str) -> None:
    """Do nothing: kinetic reads credentials where it needs them, and writes none."""


def invalidate_credential_cache(
    project: str | None = None, zone: str | None = None, cluster: str | None = None
) -> None:
    """Do nothing: there is no cache."""
