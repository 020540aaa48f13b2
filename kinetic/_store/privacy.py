"""Check that only a user can write to the user's store: kinetic unpickles and runs its content."""

from __future__ import annotations

import os
import stat

from kinetic.errors import StoreError

_warned: set[str] = set()


def check(root: str) -> bool:
    """Check the folder and warn once if others can read it; return True if it exists.

    Raises:
        StoreError: the folder belongs to another user, or others can write to it.
    """
    try:
        facts = os.stat(root)  # noqa: PTH116 - a Path would take as long as the call
    except OSError:
        return False
    if not stat.S_ISDIR(facts.st_mode):
        return False
    if facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
        return True
    if fault := fault_of(root, facts):
        raise StoreError(fault)
    readable = 0o005 if _is_own_group(facts.st_gid) else 0o055
    if facts.st_mode & readable and root not in _warned:
        _warned.add(root)
        import logging  # needed only here

        message = "kinetic: Others can read the store %s (mode %o). Run: chmod 700 %s"
        logging.getLogger("kinetic.storage").warning(
            message, root, stat.S_IMODE(facts.st_mode), _quote_path(root)
        )
    return True


def fault_of(root: str, facts: os.stat_result) -> str:
    """Explain why the folder must not be used and how to fix it; return "" if it may be used."""
    if facts.st_uid != os.geteuid():
        return (
            f"The store {root} belongs to {_user(facts.st_uid)}, but you are "
            f"{_user(os.geteuid())}: its owner could run code as you. Set KINETIC_STORE to a "
            f"folder of your own, or run this as {_user(facts.st_uid)}."
        )
    if others := _writers(facts):
        mode = stat.S_IMODE(facts.st_mode)
        # A sticky folder such as /tmp is shared on purpose: do not suggest to change its mode.
        own = f"Set KINETIC_STORE to a folder of your own, such as {root}/kinetic-{os.geteuid()}."
        private = f"Run: chmod 700 {_quote_path(root)}"
        return (
            f"The store {root} is writable by {others} (mode {mode:o}), who could run code as you. "
            f"{own if facts.st_mode & stat.S_ISVTX else private}"
        )
    return ""


def _writers(facts: os.stat_result) -> str:
    """Name the users besides the owner who can write to the folder; "" if nobody can. A sticky bit
    makes no difference, because they can still add files."""
    if facts.st_mode & stat.S_IWOTH:
        return "everybody"
    if facts.st_mode & stat.S_IWGRP and not _is_own_group(facts.st_gid):
        return f"group {_group(facts.st_gid)}"
    return ""


def _is_own_group(gid: int) -> bool:
    """True if the group is the user's private one: same name, no other members."""
    import grp

    name = _user(os.geteuid())
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _quote_path(path: str) -> str:
    import shlex

    return shlex.quote(path)


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
