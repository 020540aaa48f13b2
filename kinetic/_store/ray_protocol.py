"""The requests between a `RayStore` and the store server of its folder.

In: what is to be done. Out: bytes and names, the same on both sides.

The dashboard takes packages, which lie in the memory of the cluster's control store, and shows
files below the folder of the head's logs. So a request is a package, which the store server fetches
and deletes; and its response is a file: a short one is the name of an empty file, which is found by
one list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from kinetic._store.base import check_key
from kinetic.errors import UsageError

FOLDER = "kinetic"
"""In the folder of the head's logs."""
CONTENT = f"{FOLDER}/store"
RESPONSES = f"{FOLDER}/responses"
UPLOADS = f"{FOLDER}/uploads"
SERVER = f"{FOLDER}/server.json"
"""The store server has the record lock of this file while it runs."""
PACKAGE_PREFIX = "kinetic-request-"
LONGEST_NAME = 120
"""Of a response in a file's name, which has at most 255 bytes."""
_IN_FILE = "@"
_GOES_ON = "\x1f"
_PART_LENGTH = 60
"""Characters of a key's part that are the name of one file or folder: at most 240 bytes."""

Request = Mapping[str, Any]


def path_of(key: str) -> str:
    """Return the path of a key in the folder: parts of keys may be longer than names of files, and
    go on in a folder then.

    Raises:
        UsageError: it is not a valid key.
    """
    if _GOES_ON in key:
        raise UsageError(f"{key!r} is not a key of this store: it has a control character.")
    return "/".join(map(_path_of_part, check_key(key)))


def _path_of_part(part: str) -> str:
    starts = range(0, len(part), _PART_LENGTH)
    return f"{_GOES_ON}/".join(part[start : start + _PART_LENGTH] for start in starts)


def key_of(path: str) -> str:
    """Return the key whose path this is."""
    return path.replace(f"{_GOES_ON}/", "")


def is_whole_part(name: str) -> bool:
    """Whether a folder is a part of keys, and not the beginning of one."""
    return not name.endswith(_GOES_ON)


def package_name(request_id: str) -> str:
    """Return the package that carries the request with this id."""
    return f"{PACKAGE_PREFIX}{request_id}.zip"


def request_id_of(name: str) -> str:
    """Return the id of the request that a package carries."""
    return name.removeprefix(PACKAGE_PREFIX).removesuffix(".zip")


def pack_request(request: Request, data: bytes = b"") -> bytes:
    """Return a request with the content that goes with it."""
    return json.dumps(request).encode() + b"\n" + data


def unpack_request(package: bytes) -> tuple[Request, bytes]:
    """Return what was packed."""
    head, _, data = package.partition(b"\n")
    return json.loads(head), data


def response_name(request_id: str, response: Any) -> tuple[str, bytes]:
    """Return the name of the file that responses a request, and its content."""
    text = json.dumps(response, separators=(",", ":"))
    name = quote(text, safe="")
    if len(name) > LONGEST_NAME:
        return f"{request_id}={_IN_FILE}", text.encode()
    return f"{request_id}={name}", b""


def read_response_name(name: str) -> tuple[bool, Any]:
    """Return whether the name tells the response, and which."""
    text = name.partition("=")[2]
    return (False, None) if text == _IN_FILE else (True, json.loads(unquote(text)))
