"""Ray clusters that only the options of a function have named: they keep its jobs, so whoever looks
for a job looks there, too.

In: settings of calls. Out: an empty file for each store, in the cache; flags of settings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from kinetic._config import settings as configuration
from kinetic._config.settings import Settings


def note_store(chosen: Settings) -> None:
    """Remember the store of a call; without a cache to write to, it has to be named again."""
    with contextlib.suppress(OSError):
        _folder(chosen).mkdir(parents=True, exist_ok=True)
        _file(chosen, chosen.store).touch()


def list_flags(flags: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """Return flags that name each store that was remembered, but for the one that these name."""
    chosen = configuration.load(flags=flags)
    try:
        names = sorted(os.listdir(_folder(chosen)))
    except OSError:
        return []
    return [dict(flags, store=uri) for uri in map(unquote, names) if uri != chosen.store]


def forget_store(uri: str) -> None:
    """It does not answer: nobody waits for it again, until a call goes there or names it."""
    with contextlib.suppress(OSError):
        _file(configuration.load(), uri).unlink()


def _file(chosen: Settings, uri: str) -> Path:
    return _folder(chosen) / quote(uri, safe="")


def _folder(chosen: Settings) -> Path:
    return Path(chosen.cache_dir) / "stores"
