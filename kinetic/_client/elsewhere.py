"""Ray clusters that only the options of a function have named: they keep its jobs, so whoever looks
for a job looks there, too.

In: settings of calls. Out: a file for each store, in the cache, as old as its last answer, with a
digest of the token that it was called with; flags of settings.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from kinetic._config import settings as configuration
from kinetic._config.settings import Settings
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic.errors import KineticError, NotFound, StoreError

T = TypeVar("T")

_PATIENCE_S = 3.0
"""How long a cluster that may be gone delays a list."""
_REMEMBERED_S = 30 * 86_400
"""How long a cluster may be silent before it counts as gone."""


def note_store(chosen: Settings) -> None:
    """Remember the store of a call; without a cache to write to, it has to be named again."""
    with contextlib.suppress(OSError):
        _folder(chosen).mkdir(mode=0o700, parents=True, exist_ok=True)
        _file(chosen, chosen.store).write_text(_digest_token(chosen.store))


def list_flags(flags: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """Return flags that name each store that was remembered and answers, but for the one that these
    flags name. For the others there is a warning."""
    chosen = configuration.load(flags=flags)
    others = [uri for uri in _list_stores(chosen) if uri != chosen.store]
    if not others:
        return []
    # Most people have one store.
    import logging
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(others)) as pool:
        problems = list(pool.map(functools.partial(_find_problem, chosen), others))
    for uri, problem in zip(others, problems, strict=True):
        if problem:
            logging.getLogger("kinetic.jobs").warning(
                "The jobs of a cluster that was used before are left out. %s", problem
            )
        _note_answer(_file(chosen, uri), answered=not problem)
    named = zip(others, problems, strict=True)
    return [dict(flags, store=uri) for uri, problem in named if not problem]


def open_configured(flags: Mapping[str, str | None]) -> Store:
    """Open the store of settings and flags."""
    return open_store(configuration.load(flags=flags).store)


def find_in_stores(flags: Mapping[str, str | None], find: Callable[[Store], T]) -> T:
    """Return what the store of these flags has or, if it has nothing, what another one has."""
    try:
        return find(open_configured(flags))
    except NotFound:
        for other in list_flags(flags):
            with contextlib.suppress(NotFound, StoreError):
                return find(open_configured(other))
        raise


def has_stores() -> bool:
    """Whether any is remembered; whether it answers takes longer to say."""
    return bool(_list_stores(configuration.load()))


def _list_stores(chosen: Settings) -> list[str]:
    try:
        return sorted(map(unquote, os.listdir(_folder(chosen))))
    except OSError:
        return []


def _find_problem(chosen: Settings, uri: str) -> str:
    """Why a store does not answer, or is not asked; "" if it answers."""
    if not uri.startswith("ray+"):
        return ""
    from kinetic._ray import address

    try:
        if _digest_token(uri) not in ("", _file(chosen, uri).read_text()):
            return (
                f"{uri.removeprefix('ray+')} was not used with the token that this environment has "
                f"for Ray, so it is not sent there. KINETIC_STORE={uri} names it, and sends it."
            )
        address.connect(uri.removeprefix("ray+"), patience_s=_PATIENCE_S).version()
    except (KineticError, OSError) as error:
        return str(error)
    return ""


def _digest_token(uri: str) -> str:
    """Return what tells the token of this environment from others, and is of use to nobody; "" if
    it has none, or none is sent to such a store."""
    if not uri.startswith("ray+"):
        return ""
    import hashlib

    from kinetic._ray import address

    token = address.find_token(configuration.variables())
    made = hashlib.blake2b(token.encode(), digest_size=8, key=uri.encode()[:64])
    return made.hexdigest() if token else ""


def _note_answer(file: Path, *, answered: bool) -> None:
    with contextlib.suppress(OSError):
        if answered:
            os.utime(file)
        elif time.time() - file.stat().st_mtime > _REMEMBERED_S:
            file.unlink()


def _file(chosen: Settings, uri: str) -> Path:
    return _folder(chosen) / quote(uri, safe="")


def _folder(chosen: Settings) -> Path:
    return Path(chosen.cache_dir) / "stores"
