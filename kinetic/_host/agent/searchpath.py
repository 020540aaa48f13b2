"""PYTHONPATH and PATH of what runs on a host: programs that it starts import what was sent, not the
caller's folder, and are those of the environment that the host runs in.

In: the values that the caller has or requests, folders of the tree, the interpreter. Out: the
values for the host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def for_programs(places: Sequence[str], inherited: str, *, client_root: str, tree: str) -> str:
    """Return the search path: the tree's places first, then the caller's, with the tree in place of
    the project.

    A folder with a module named like one of the standard library is left out, because it would hide
    that from every program; one that the caller's own PYTHONPATH names stays.
    """
    own = [place for place in places if not _hides_standard_modules(place)]
    theirs = (
        move_path(inherited, client_root=client_root, tree=tree).split(os.pathsep)
        if inherited
        else []
    )
    return os.pathsep.join(dict.fromkeys([*own, *theirs]))


def move_path(value: str, *, client_root: str, tree: str) -> str:
    """Return a search path with the project's folders replaced by those of the tree, if they were
    sent."""
    return os.pathsep.join(
        _move_entry(entry, client_root, tree) for entry in value.split(os.pathsep)
    )


def environment_first(
    inherited: Mapping[str, str], *, executable: str, prefix: str, is_virtual: bool
) -> dict[str, str]:
    """Return the variables with which `python` and console scripts are the environment's of this
    interpreter, as if it were active, which it need not be where the job was submitted.

    Args:
        inherited: the variables so far.
        executable: the interpreter.
        prefix: the folder of its environment.
        is_virtual: whether that is a virtual environment; another one's order is left as it is if
            it is on PATH at all.
    """
    programs = str(Path(executable).parent) if executable else ""
    entries = inherited.get("PATH", os.defpath).split(os.pathsep)
    if not programs or (programs in entries if not is_virtual else entries[0] == programs):
        return {}
    path = os.pathsep.join(dict.fromkeys([programs, *entries]))
    return {"PATH": path} | ({"VIRTUAL_ENV": prefix} if is_virtual else {})


def _move_entry(entry: str, client_root: str, tree: str) -> str:
    root = client_root.rstrip("/")
    real = os.path.realpath(entry) if entry.startswith("/") and client_root else ""
    if real != client_root and not real.startswith(f"{root}/"):
        return entry
    place = tree + real[len(root) :]
    # What was not sent (a virtual environment, for example) stays where it is.
    return place if Path(place).is_dir() else entry


def _hides_standard_modules(place: str) -> bool:
    try:
        names = os.listdir(place)
    except OSError:
        return False
    return any(
        name.removesuffix(".py") in sys.stdlib_module_names
        and (name.endswith(".py") or Path(place, name, "__init__.py").is_file())
        for name in names
    )
