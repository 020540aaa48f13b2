"""Make this interpreter look like one on macOS, without the features that only Linux has.

In: a PYTHONPATH that begins with this folder. Out: `sys.platform` and `os.uname` of a Mac, no
system call and constant that macOS lacks, no /proc and /sys, few open files, and no way to fork,
which macOS's own libraries forbid to programs with threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
import platform
import posix
import re
import resource
import select
import selectors
import signal
import socket
import sys
import sysconfig
import time
import types

ONLY_ON_LINUX = {
    os: r"pidfd_|P_PIDFD|memfd_|MFD_|sched_[gsr]|SCHED_[BIR]|posix_fa|POSIX_FADV|pipe2|eventfd|EFD_"
    r"|splice|SPLICE|copy_file_range|[gsr]etxattr|removexattr|listxattr|XATTR|[gs]etres[ug]id"
    r"|getrandom|GRND|fdatasync|waitid|setns|unshare|CLONE_|timerfd|TFD_|RWF_|RTLD_DEEPBIND|ST_[ANMRSW]"
    r"|O_(DIRECT|LARGEFILE|NOATIME|PATH|RSYNC|TMPFILE)$",
    signal: r"pidfd_|sigtimedwait|sigwaitinfo|struct_siginfo|SIG(CLD|POLL|PWR|RTM|STKFLT)",
    select: r"epoll|EPOLL|POLLMSG|POLLRDHUP",
    fcntl: r"DN_|F_(ADD_SEALS|EXCLCK|GET|NOTIFY|SEAL|SETPIPE|SETSIG|SHLCK|\w+64|OFD)"
    r"|LOCK_(MAND|READ|RW)",
    socket: r"SOCK_(CLOEXEC|NONBLOCK)|SO_(PEERCRED|PASSCRED|DOMAIN|PROTOCOL|BINDTODEVICE|MARK)"
    r"|AF_(NETLINK|VSOCK|PACKET|ALG)|MSG_(MORE|CMSG_CLOEXEC|ERRQUEUE)|SCM_CRED"
    r"|TCP_(KEEPIDLE|USER_TIMEOUT|QUICKACK|CORK|INFO)",
    time: r"CLOCK_(BOOTTIME|TAI)|pthread_getcpuclockid",
    resource: r"prlimit|RUSAGE_THREAD|RLIMIT_(MSGQ|NICE|RT|SIGP)",
    mmap: r"MADV_(DO|HUGE|MERGE|REMOVE)|MAP_POPULATE",
}
"""Patterns for beginnings of names that Linux has and macOS lacks (as in typeshed), by module."""
KEPT = {"F_GETFD", "F_GETFL", "F_GETLK", "F_GETOWN"}
CALLS = {"prctl", "tgkill", "unshare", "setns", "mount", "umount2", "pivot_root", "capset"}
OPEN_FILES = 256
"""The default limit of open files in a terminal of macOS."""


def take_away() -> None:
    for module, names in ONLY_ON_LINUX.items():
        for name in [n for n in dir(module) if re.match(names, n) and n not in KEPT]:
            delattr(module, name)
            if module is os and hasattr(posix, name):
                delattr(posix, name)


def is_linux_only(path: object) -> bool:
    if isinstance(path, bytes | str | os.PathLike):
        return bool(re.match(r"/(proc|sys)(/|$)", os.fsdecode(path)))
    return False


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.chdir") and is_linux_only(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in CALLS:
        raise AttributeError(f"dlsym: symbol not found: {arguments[1]}")
    if event in ("os.fork", "os.forkpty"):
        raise OSError("a program with threads must not fork on macOS")


def without_proc(name: str) -> None:
    call = getattr(os, name)

    def guarded(path, *arguments, **options):
        if is_linux_only(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *arguments, **options)

    setattr(os, name, guarded)


def become_a_mac() -> None:
    sysconfig.get_config_vars()  # Load them while the platform is Linux.
    sys.platform = "darwin"
    release = "Darwin Kernel Version 23.5.0: RELEASE_ARM64_T6000"
    names = os.uname_result(("Darwin", "mac.local", "23.5.0", release, "arm64"))
    os.uname = lambda: names
    platform.mac_ver = lambda *_: ("14.5", ("", "", ""), "arm64")
    take_away()
    importlib.reload(selectors)
    for name in ("stat", "lstat", "readlink"):
        without_proc(name)
    # urllib asks the system's settings for proxies.
    proxies = types.ModuleType("_scproxy")
    proxies._get_proxies = dict
    proxies._get_proxy_settings = lambda: {"exclude_simple": False}
    sys.modules["_scproxy"] = proxies
    # IPython's kernel needs this package on a Mac, to be let run in the background.
    naps = types.ModuleType("appnope")
    naps.nope = lambda: None
    sys.modules["appnope"] = naps
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    ctypes.CDLL(None)  # Load it before /proc cannot be opened.
    sys.addaudithook(refuse)


become_a_mac()
