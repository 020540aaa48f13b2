"""`kinetic.Data`: data that the caller declares, separate from the source tree."""

# ruff: noqa: PTH118

from __future__ import annotations

import hashlib
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kinetic._core import preemption
from kinetic._core.tracebacks import hide_frames
from kinetic._store.many import FILE_THREADS, at_once
from kinetic.errors import DataNotFound, UsageError, UsageTypeError

if TYPE_CHECKING:
    from kinetic._source.bundle import Bundle

    _Path = str  # Type checkers see the path that the function gets.
else:
    _Path = object

_THREADED_FROM = 17
_CHUNK_BYTES = 1 << 20
_HUB_PREFIX = "datasets/"
_HF_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_alive: weakref.WeakValueDictionary[int, Data] = weakref.WeakValueDictionary()
_HF_OPTIONS = ("split", "config_name", "revision")


def list_alive() -> list[Data]:
    """Return every `Data` that is alive in this process."""
    return list(_alive.values())


class Data(_Path):
    """Data for a job: a local file or folder, `gs://bucket/path`, or
    `hf://name?split=...&config_name=...&revision=...`.

    Pass it as an argument, alone or inside containers and objects, or use it in the function: the
    function receives the path of the data on the host, a string. Or mount it at a fixed path with
    `volumes={"/data": Data(...)}`. Data is read-only on hosts, except for a `writable` folder of a
    bucket.

    An instance stands for the content at its first use. To send changed files, make a new instance.

    Args:
        path: A local path, relative to the working directory, or a gs:// or hf:// URI.
        fuse: Mount the data instead of copying it.
        hf_trust_remote_code: Let a Hugging Face data set run its own code while it is loaded.
        writable: Mount a folder of a bucket so that the function can write to it. The folder need
            not exist. For simulated slices, a folder of this machine stands in for it.

    Raises:
        UsageError: The path does not exist (on a host only when it is used), or the URI is
            malformed.

    Example:
        ```python
        @kinetic.run(accelerator="tpu-v6e-16")
        def train(images):
            return len(os.listdir(images))


        train(kinetic.Data("./images"))
        ```
    """

    if TYPE_CHECKING:

        def __new__(
            cls,
            path: str | os.PathLike[str],
            fuse: bool = False,
            hf_trust_remote_code: bool = False,
            *,
            writable: bool = False,
        ) -> Self: ...

    def __init__(
        self,
        path: str | os.PathLike[str],
        fuse: bool = False,
        hf_trust_remote_code: bool = False,
        *,
        writable: bool = False,
    ) -> None:
        switches = {
            "fuse": fuse,
            "hf_trust_remote_code": hf_trust_remote_code,
            "writable": writable,
        }
        with hide_frames:
            for name, value in switches.items():
                if not isinstance(value, bool):
                    raise UsageTypeError(f"Data({name}=...) must be True or False; got {value!r}.")
            self._path, self._is_dir = _check_path(path, fuse, writable)
        self._fuse, self._writable = fuse or writable, writable
        self._hf_trust_remote_code = hf_trust_remote_code
        self._reset()

    def _reset(self) -> None:
        _alive[id(self)] = self
        self._lock = threading.Lock()
        self._hash: str | None = None
        self._bundle: Bundle | None = None
        self._was_sent = False

    @property
    def path(self) -> str:
        """The absolute local path, or the URI."""
        return self._path

    @property
    def fuse(self) -> bool:
        """True if the data is mounted instead of copied."""
        return self._fuse

    @property
    def writable(self) -> bool:
        """True if the function can write to the data."""
        return self._writable

    @property
    def hf_trust_remote_code(self) -> bool:
        """True if a Hugging Face data set may run its own code."""
        return self._hf_trust_remote_code

    @property
    def is_gcs(self) -> bool:
        """True if the data is in Google Cloud Storage."""
        return self._path.startswith("gs://")

    @property
    def is_hf(self) -> bool:
        """True if the data is a Hugging Face data set."""
        return self._path.startswith("hf://")

    @property
    def is_dir(self) -> bool:
        """True if the function receives a folder, False for a file."""
        return self._is_dir

    @property
    def is_local(self) -> bool:
        """True if the data is on the caller's machine."""
        return not (self.is_gcs or self.is_hf)

    def __repr__(self) -> str:
        options = (
            ("fuse", self._fuse and not self._writable),
            ("hf_trust_remote_code", self._hf_trust_remote_code),
            ("writable", self._writable),
        )
        arguments = [repr(self._path), *(f"{name}=True" for name, value in options if value)]
        return f"Data({', '.join(arguments)})"

    def __fspath__(self) -> str:
        """Return the local path, so that code which opens the data also works on the caller."""
        if not self.is_local:
            raise UsageError(
                f"{self._path} has no path on this machine. Pass it to a function that runs as a "
                "job."
            )
        if _is_on_host() and not os.path.lexists(self._path):
            raise DataNotFound(
                f"{self!r}: there is no file or folder {self._path} on this host. A host has only "
                "the data of the call: pass this Data to the function as an argument."
            )
        return self._path

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling checks nothing, because another machine may not have the path. The packed
        # content is not part of the pickle.
        facts = (self._path, self._is_dir, self._fuse, self._hf_trust_remote_code, self._writable)
        return _rebuilt, facts

    def content_hash(self) -> str:
        """Return the SHA-256 of names and contents, computed once per instance.

        Raises:
            UsageError: The data is not local, or a part of it cannot be read.
        """
        if not self.is_local:
            raise UsageError(f"{self._path} has no content hash: only local data has one.")
        with self._lock:
            if self._hash is None:
                self._hash = _hash_content(Path(self._path), is_dir=self._is_dir)
            return self._hash

    def pack(self, *, cache_dir: Path, exclude: tuple[Path, ...] = ()) -> Bundle:
        """Pack local data, and return its content; packed only once per instance."""
        with self._lock:
            if self._bundle is None:
                from kinetic._source import bundle

                self._bundle = bundle.build_data(
                    Path(self._path), exclude=exclude, cache_dir=cache_dir
                )
            return self._bundle

    @property
    def was_sent(self) -> bool:
        """True if the data was sent to a job: the instance then stands for the sent content."""
        return self._was_sent

    def note_sent(self, changed: Bundle | None) -> None:
        """Record that the data was sent; `changed` is the content that was sent, if it differs from
        the packed content."""
        with self._lock:
            self._bundle, self._was_sent = changed or self._bundle, True


def _rebuilt(
    path: str, is_dir: bool, fuse: bool, hf_trust_remote_code: bool, writable: bool = False
) -> Data:
    data: Data = object.__new__(Data)
    data._path, data._is_dir, data._fuse = path, is_dir, fuse
    data._hf_trust_remote_code, data._writable = hf_trust_remote_code, writable
    data._reset()
    return data


def _check_path(path: object, fuse: bool, writable: bool) -> tuple[str, bool]:
    """Return the path or URI, and True if it is a folder."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageTypeError(f"kinetic.Data needs a path or a URI as a string; got {path!r}.")
    if not text.strip() or "\0" in text:
        raise UsageError(
            "kinetic.Data needs the path of a file or folder, or a gs:// or hf:// URI; got "
            f"{text!r}."
        )
    scheme, separator, rest = text.partition("://")
    if writable and (scheme != "gs" or not separator or not text.endswith("/")):
        raise UsageError(
            f"Data({text!r}, writable=True): only a folder of a bucket can be writable, such as "
            "gs://bucket/runs/ with a slash at its end. For files on this machine use output_dir=."
        )
    if not separator:
        return _check_local(text)
    if scheme == "gs":
        return text, _is_gcs_folder(text, rest)
    if scheme == "hf":
        return f"hf://{_check_hub_name(text, rest, fuse)}", True
    raise UsageError(
        f"kinetic.Data cannot read {scheme}://. Give a local path, gs://bucket/path, or hf://name."
    )


def _is_on_host() -> bool:
    """True in the worker of a job, and in programs that its function starts."""
    return os.path.isdir(os.environ.get(preemption.VARIABLE, ""))


def _check_local(text: str) -> tuple[str, bool]:
    path = os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - messages show the user's own text
    if os.path.isdir(path):
        return path, True
    if Path(path).is_file():
        return path, False
    if _is_on_host():  # In a module that the host imports; the function may not use this data.
        return path, True
    if os.path.lexists(path):
        raise UsageError(f"Data({text!r}): {path} is neither a file nor a folder.")
    raise DataNotFound(
        f"Data({text!r}): there is no file or folder {path}. Relative paths start at the working "
        "directory."
    )


def _is_gcs_folder(text: str, rest: str) -> bool:
    bucket, _, inside = rest.partition("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
        raise UsageError(
            f"Data({text!r}): {bucket!r} is not a valid bucket name. Bucket names have 3 to 222 "
            "lower-case letters, digits, '-', '_' and '.'."
        )
    if any(part in (".", "..") for part in inside.split("/")):
        raise UsageError(f"Data({text!r}): write the path without '.' and '..'.")
    if text.endswith("/") or not inside:
        return True
    import warnings

    warnings.warn(
        f"{text} is taken for a single object. For a folder write {text}/ with a slash.",
        UserWarning,
        stacklevel=4,
    )
    return False


def _check_hub_name(text: str, rest: str, fuse: bool) -> str:
    """Return the part after hf://. The hub's own form, hf://datasets/owner/name@revision, is also
    accepted."""
    from urllib.parse import parse_qsl

    if fuse:
        raise UsageError(
            f"Data({text!r}, fuse=True): a Hugging Face data set cannot be mounted. Omit fuse."
        )
    name, _, query = rest.partition("?")
    name, _, revision = name.removeprefix(_HUB_PREFIX).rstrip("/").partition("@")
    if revision:
        query = "&".join(filter(None, (query, f"revision={revision}")))
    if not _HF_NAME.fullmatch(name):
        raise UsageError(
            f"Data({text!r}): write hf://name or hf://owner/name for a whole data set, followed by "
            "?split=... for a part of it."
        )
    try:
        options = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise UsageError(
            f"Data({text!r}): the part after ? is malformed. Write name=value, separated by &."
        ) from error
    names = [option for option, _ in options]
    wrong = [
        option
        for option, value in options
        if option not in _HF_OPTIONS or not value or names.count(option) > 1
    ]
    if wrong:
        raise UsageError(
            f"Data({text!r}): {wrong[0]!r} is unknown, repeated or without a value. Options are "
            f"{', '.join(_HF_OPTIONS)}."
        )
    return f"{name}?{query}" if query else name


# -- the digest ------------------------------------------------------------------------------------


def _hash_content(path: Path, *, is_dir: bool) -> str:
    """Return one digest for names and contents; times, owners and permissions do not count.

    The digest has two levels. A file's digest covers its relative path, a NUL and its content. The
    whole digest covers a word that is different for folders and files, and the files' digests,
    sorted by path.

    Raises:
        UsageError: A part of the data cannot be read.
    """
    try:
        files = sorted(_walk_files(str(path))) if is_dir else [(path.name, str(path))]
        threads = FILE_THREADS if len(files) >= _THREADED_FROM else 1
        digests = at_once(_hash_file, files, threads)
    except OSError as error:
        raise UsageError(f"The data {path} cannot be read: {error.strerror}.") from error
    whole = hashlib.sha256(b"dir:" if is_dir else b"file:")
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def _walk_files(root: str) -> Iterator[tuple[str, str]]:
    """Yield the relative and the full path of each file. Follows links, but not in a circle."""
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while todo:
        rel, ancestors = todo.pop()
        folder = os.path.join(root, rel)
        info = os.stat(folder)  # noqa: PTH116
        if (info.st_dev, info.st_ino) in ancestors:
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                inside = os.path.join(rel, entry.name)
                if entry.is_dir():
                    todo.append((inside, ancestors | {(info.st_dev, info.st_ino)}))
                elif entry.is_file():
                    yield inside, entry.path


def _hash_file(file: tuple[str, str]) -> bytes:
    digest = hashlib.sha256(os.fsencode(file[0]) + b"\0")
    with open(file[1], "rb", buffering=0) as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
