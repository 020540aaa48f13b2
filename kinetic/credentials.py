"""Public: functions that do nothing, for scripts written for keras-kinetic's credential cache."""

from __future__ import annotations

__all__ = ["ensure_credentials", "invalidate_credential_cache"]


def ensure_credentials(project: str, zone: str, cluster: str) -> None:
    """Do nothing: kinetic reads the cloud's own credentials when it needs them, and writes none."""


def invalidate_credential_cache(
    project: str | None = None, zone: str | None = None, cluster: str | None = None
) -> None:
    """Do nothing: kinetic has no cache of credentials."""
