"""The protocol between a `RayStore` and its store server, the same on both sides.

The dashboard accepts packages, which lie in the memory of the cluster's control store, and shows
files below the folder of the head's logs. So a request is a package that the store server fetches
and deletes, and its response is a file. A short response is the name of an empty file, so that one
list call finds and reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from kinetic._store.base import check_key
from kinetic.errors import UsageError

FOLDER = "kinetic"
"""The store's folder in the folder of the head's logs."""
CONTENT = f"{FOLDER}/store"
RESPONSES = f"{FOLDER}/responses"
UPLOADS = f"{FOLDER}/uploads"
SERVER = f"{FOLDER}/server.json"
"""The file whose record lock the store server holds while it runs."""
PACKAGE_PREFIX = "kinetic-request-"
LONGEST_NAME = 120
"""Length, in characters, up to which a response is sent as the name of an empty file."""
_IN_FILE = "@"
_CONTINUATION = "\x1f"
_PART_LENGTH = 60
"""Most characters of a key's part in one file name, which then has at most 240 bytes."""

Request = Mapping[str, Any]


def path_of(key: str) -> str:
    """Return the path of a key in the folder. A part that is too long for a file name is split
    into nested folders.

    Raises:
        UsageError: the key is not valid.
    """
    if _CONTINUATION in key:
        raise UsageError(f"{key!r} is not a valid key: it contains a control character.")
    return "/".join(map(_path_of_part, check_key(key)))


def _path_of_part(part: str) -> str:
    starts = range(0, len(part), _PART_LENGTH)
    return f"{_CONTINUATION}/".join(part[start : start + _PART_LENGTH] for start in starts)


def key_of(path: str) -> str:
    """Return the key that a path belongs to; the inverse of `path_of`."""
    return path.replace(f"{_CONTINUATION}/", "")


def is_whole_part(name: str) -> bool:
    """True if a folder's name ends a part of a key, False if the part continues below it."""
    return not name.endswith(_CONTINUATION)


def package_name(request_id: str) -> str:
    """Return the name of the package that carries a request."""
    return f"{PACKAGE_PREFIX}{request_id}.zip"


def request_id_of(name: str) -> str:
    """Return the id of the request in a package, from the package's name."""
    return name.removeprefix(PACKAGE_PREFIX).removesuffix(".zip")


def pack_request(request: Request, data: bytes = b"") -> bytes:
    """Encode a request and its content as a package."""
    return json.dumps(request).encode() + b"\n" + data


def unpack_request(package: bytes) -> tuple[Request, bytes]:
    """Decode a package into the request and its content."""
    head, _, data = package.partition(b"\n")
    return json.loads(head), data


def response_name(request_id: str, response: Any) -> tuple[str, bytes]:
    """Return the name and the content of the file that answers a request."""
    text = json.dumps(response, separators=(",", ":"))
    name = quote(text, safe="")
    if len(name) > LONGEST_NAME:
        return f"{request_id}={_IN_FILE}", text.encode()
    return f"{request_id}={name}", b""


def read_response_name(name: str) -> tuple[bool, Any]:
    """Return True and the response if the file's name contains it, else False and None."""
    text = name.partition("=")[2]
    return (False, None) if text == _IN_FILE else (True, json.loads(unquote(text)))
