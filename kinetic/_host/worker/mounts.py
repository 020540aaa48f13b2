"""Data at fixed paths: mounts in the worker's own namespace, read-only unless the data is writable.

A process that may not mount (any but root's) first enters a user namespace, in which it may. At the
end it drops these rights: the function runs with its user's rights and cannot undo the mounts.

A target that does not exist is created as an empty folder (or file) and stays, as with Docker, so
that the function can write next to it. If that is not permitted, or directly below the root, the
nearest existing folder above the target is covered by a folder in memory with the same entries and
the missing entry.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH115, PTH116, PTH118, PTH120, PTH211

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic.errors import SetupFailed

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_MOVE, _MS_REC = 1, 32, 4096, 8192, 16384
_MS_UNBINDABLE, _MS_PRIVATE, _MS_SLAVE = 1 << 17, 1 << 18, 1 << 19
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_CAPABILITY_VERSION_3 = 0x20080522
_REMOUNT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
"""Flags of a mount that a remount must repeat; the numbers are those of mount(2)."""
_MOST_ENTRIES = 2000
_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EUSERS, errno.ENOSPC}
_REMEDY = (
    "Pass the data as an argument instead: the function then gets a path, and needs no mount. "
    "Or allow mounts: run where unprivileged user namespaces are enabled (sysctl "
    "user.max_user_namespaces above 0 and, on Ubuntu, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or in a container with CAP_SYS_ADMIN."
)


@dataclass(frozen=True)
class Mount:
    """A file or folder that appears at another path.

    Attributes:
        source: the file or folder.
        target: path at which it appears; need not exist.
        optional: the job goes on without the mount, which only adds to the protection that
            permissions give.
        writable: the function may write to the target.
    """

    source: str
    target: str
    optional: bool = False
    writable: bool = False


def enter(mounts: Sequence[Mount], *, scratch: str) -> None:
    """Move this process into a mount namespace of its own and mount everything there.

    Args:
        mounts: the mounts; no target is inside another.
        scratch: an empty folder of this host's own, which need not exist yet.

    Raises:
        SetupFailed: this machine does not allow mounts, or a target does not fit its source.
    """
    if not mounts:
        return
    if all(mount.optional for mount in mounts):
        _guard(mounts)
        return
    for mount in mounts:
        if not os.path.exists(mount.source):  # noqa: PTH110
            raise SetupFailed(
                f"The data {mount.source} is no longer on this host. Submit the job again."
            )
    try:
        in_user_namespace = unshare()
        for mount in mounts:
            _make_target(mount, scratch)
        _bind_all(mounts)
        if in_user_namespace:
            drop_capabilities()
    except OSError as error:
        targets = ", ".join(mount.target for mount in mounts if not mount.optional)
        raise SetupFailed(
            f"The data at {targets} cannot be mounted: {error.strerror}. {_REMEDY}"
        ) from error


def _guard(mounts: Sequence[Mount]) -> None:
    """Make the read-only mounts if the user is root. For others, permissions protect the data."""
    if os.geteuid() != 0:
        return
    try:
        _call("unshare", _CLONE_NEWNS)
        _separate()
        _bind_all(mounts)
    except OSError:
        return


# -- namespaces ------------------------------------------------------------------------------------


def unshare() -> bool:
    """Enter a new mount namespace; return True if that took a user namespace."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system has no mount namespaces")
    try:
        _call("unshare", _CLONE_NEWNS)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        _enter_user_namespace()
        in_user_namespace = True
    else:
        in_user_namespace = False
    _separate()
    return in_user_namespace


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _separate() -> None:
    """Let later mounts of the machine appear in this namespace, but not those of this namespace on
    the machine."""
    _mount(None, "/", _MS_SLAVE | _MS_REC)


def drop_capabilities() -> None:
    """Drop the capabilities that the user namespace gave to this process."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _call("capset", header, none)


# -- targets ---------------------------------------------------------------------------------------


def _make_target(mount: Mount, scratch: str) -> None:
    """Create the target if it does not exist, as a file or folder like the source."""
    target = os.path.realpath(mount.target)
    is_dir = os.path.isdir(mount.source)
    if os.path.lexists(target):
        if os.path.isdir(target) != is_dir:
            kinds = ("folder", "file") if is_dir else ("file", "folder")
            raise SetupFailed(
                f"A {kinds[0]} cannot be mounted at {mount.target}, which is a {kinds[1]}. Choose "
                "another path in volumes=."
            )
        return
    parent = os.path.dirname(target)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise SetupFailed(
            f"Data cannot be mounted at {mount.target}: {parent} is not a folder. Choose another "
            "path in volumes=."
        )
    if parent != "/":
        with contextlib.suppress(OSError):
            os.makedirs(target if is_dir else os.path.dirname(target), exist_ok=True)
            if not is_dir:
                Path(target).touch()
            return
    _cover(parent, os.path.relpath(target, parent), scratch, is_dir=is_dir)


def _cover(folder: str, missing: str, scratch: str, *, is_dir: bool) -> None:
    """Cover a folder by one in memory with the same entries and the `missing` path, made as a
    folder if `is_dir`, else as a file."""
    with os.scandir(folder) as listing:
        entries = list(listing)
    if len(entries) > _MOST_ENTRIES:
        raise SetupFailed(
            f"{folder} has too many entries for this job to add {missing!r} to it. Create "
            f"{folder}/{missing} yourself."
        )
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    _mount("tmpfs", scratch, 0, "tmpfs", "mode=755,size=1m")
    _mount(None, scratch, _MS_UNBINDABLE)  # Otherwise it would contain itself.
    for entry in entries:
        _copy_entry(entry, os.path.join(scratch, entry.name))
    _mount(None, scratch, _MS_PRIVATE)  # The next cover may have to bind parts of this one.
    added = os.path.join(scratch, missing)
    os.makedirs(added if is_dir else os.path.dirname(added), exist_ok=True)
    if not is_dir:
        Path(added).touch()
    os.chmod(scratch, stat.S_IMODE(os.stat(folder).st_mode))
    _set_read_only(scratch, recursive=False)
    if folder == "/":
        _change_root(scratch)
    else:
        _mount(scratch, folder, _MS_MOVE)


def _copy_entry(entry: os.DirEntry[str], path: str) -> None:
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), path)
        return
    _make_stub(path, is_dir=entry.is_dir())
    # The entry may have been removed, or be a mount that only its owner may enter.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        _mount(entry.path, path, _MS_BIND | _MS_REC)


def _make_stub(path: str, *, is_dir: bool) -> None:
    if is_dir:
        os.mkdir(path, 0o700)
    else:
        Path(path).touch(0o600)


def _change_root(new: str) -> None:
    os.chdir(new)
    _call("pivot_root", b".", b".")  # The old root is now mounted over the new one.
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


# -- mounting --------------------------------------------------------------------------------------


def bind(source: str, target: str) -> None:
    """Bind a file or folder, writable, to an existing path."""
    _mount(source, target, _MS_BIND)


def _bind_all(mounts: Sequence[Mount]) -> None:
    # Open all sources before the first mount, which may hide some.
    sources = [os.open(mount.source, os.O_PATH | os.O_CLOEXEC) for mount in mounts]
    try:
        for source, mount in zip(sources, mounts, strict=True):
            _mount(f"/proc/self/fd/{source}", mount.target, _MS_BIND | _MS_REC)
            if not mount.writable:
                _set_read_only(mount.target, recursive=True)
    finally:
        for source in sources:
            os.close(source)


def _set_read_only(path: str, *, recursive: bool) -> None:
    """Make a mount read-only; with `recursive` and a kernel from 5.12 on, also the mounts below
    it."""
    attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY, 0, 0, 0)
    try:
        flags = _AT_RECURSIVE if recursive else 0
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        _call(
            "syscall",
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            _AT_FDCWD,
            os.fsencode(path),
            flags,
            attributes,
            size,
        )
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        flags = os.statvfs(path).f_flag & _REMOUNT_FLAGS
        _mount(None, path, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)


def _mount(
    source: str | None, target: str, flags: int, kind: str | None = None, options: str | None = None
) -> None:
    texts = [
        None if text is None else os.fsencode(text) for text in (source, target, kind, options)
    ]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _call(name: str, *arguments: object) -> None:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        raise OSError(errno.ENOSYS, f"the C library of this system has no {name}") from None
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
