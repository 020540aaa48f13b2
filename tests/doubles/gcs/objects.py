"""The objects of buckets: versions, preconditions, pages of names."""

from __future__ import annotations

import base64
import hashlib
import itertools
import threading
import time
from dataclasses import dataclass, field, replace

import google_crc32c

MAX_NAME_BYTES = 1024
PAGE = 1000

_REASONS = {400: "invalid", 401: "required", 403: "forbidden", 404: "notFound", 410: "gone"}
_REASONS |= {412: "conditionNotMet", 429: "rateLimitExceeded", 503: "backendError"}


class Refusal(Exception):
    """The error response to a request."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def document(self) -> dict[str, object]:
        reason = _REASONS.get(self.status, "backendError")
        error = {"message": self.message, "domain": "global", "reason": reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [error]}}


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


@dataclass(frozen=True)
class Object:
    bucket: str
    name: str
    data: bytes
    generation: int
    metageneration: int = 1
    content_type: str = "application/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    updated_at: float = 0.0

    def resource(self) -> dict[str, object]:
        document: dict[str, object] = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": self.content_type,
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "md5Hash": md5(self.data),
            "crc32c": crc32c(self.data),
            "etag": base64.b64encode(str(self.generation).encode()).decode(),
            "timeCreated": moment(self.created_at),
            "updated": moment(self.updated_at),
            "timeStorageClassUpdated": moment(self.created_at),
        }
        if self.metadata:
            document["metadata"] = self.metadata
        return document


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03}Z"


class Buckets:
    """All buckets, with the newest version of each object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.page_size = PAGE
        """The largest number of names on a page."""
        self._objects: dict[str, dict[str, Object]] = {}
        self.lifecycle: dict[str, list[dict[str, object]]] = {}
        """Lifecycle rules by bucket, which can be read but have no effect."""
        self._generations = itertools.count(int(time.time() * 1e6))

    def create(self, bucket: str) -> None:
        with self._lock:
            self._objects.setdefault(bucket, {})

    def names(self, bucket: str) -> list[str]:
        with self._lock:
            return sorted(self._of(bucket))

    def resource(self, bucket: str) -> dict[str, object]:
        with self._lock:
            self._of(bucket)
        return {
            "kind": "storage#bucket",
            "id": bucket,
            "name": bucket,
            "location": "US",
            "locationType": "multi-region",
            "projectNumber": "1",
            "storageClass": "STANDARD",
            "metageneration": "1",
        } | ({"lifecycle": {"rule": self.lifecycle[bucket]}} if bucket in self.lifecycle else {})

    def find(self, bucket: str, name: str, query: dict[str, str]) -> Object:
        with self._lock:
            existing = self._of(bucket).get(name)
            wanted = query.get("generation")
            if existing is None or wanted not in (None, str(existing.generation)):
                raise Refusal(404, f"No such object: {bucket}/{name}")
            check_preconditions(existing, query, reading=True)
            return existing

    def insert(
        self,
        bucket: str,
        name: str,
        data: bytes,
        query: dict[str, str],
        resource: dict[str, object],
        content_type: str = "",
    ) -> Object:
        check_name(name)
        for field_name, digest in (("crc32c", crc32c), ("md5Hash", md5)):
            sent = resource.get(field_name)
            if sent and sent != digest(data):
                kind = {"crc32c": "CRC32C", "md5Hash": "MD5 hash"}[field_name]
                raise Refusal(
                    400,
                    f'Provided {kind} "{sent}" doesn\'t match calculated {kind} "{digest(data)}".',
                )
        kind = str(resource.get("contentType") or content_type or "application/octet-stream")
        metadata = resource.get("metadata") or {}
        assert isinstance(metadata, dict)
        with self._lock:
            objects = self._of(bucket)
            check_preconditions(objects.get(name), query)
            now = time.time()
            created = Object(
                bucket,
                name,
                data,
                next(self._generations),
                content_type=kind,
                metadata=metadata,
                created_at=now,
                updated_at=now,
            )
            objects[name] = created
            return created

    def patch(
        self, bucket: str, name: str, query: dict[str, str], changes: dict[str, object]
    ) -> Object:
        metadata = changes.get("metadata") or {}
        assert isinstance(metadata, dict)
        with self._lock:
            objects = self._of(bucket)
            existing = self._find_target(bucket, name, query)
            merged = {k: v for k, v in (existing.metadata | metadata).items() if v is not None}
            objects[name] = replace(
                existing,
                metadata=merged,
                metageneration=existing.metageneration + 1,
                updated_at=time.time(),
            )
            return objects[name]

    def grow_old(self, bucket: str, age_s: float) -> None:
        """Make all objects of a bucket older by `age_s` seconds."""
        with self._lock:
            objects = self._of(bucket)
            for name, existing in objects.items():
                times = (existing.created_at - age_s, existing.updated_at - age_s)
                objects[name] = replace(existing, created_at=times[0], updated_at=times[1])

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self._lock:
            objects = self._of(bucket)
            self._find_target(bucket, name, query)
            del objects[name]

    def _find_target(self, bucket: str, name: str, query: dict[str, str]) -> Object:
        """Return the object that a request changes. The caller must hold the lock."""
        existing = self._of(bucket).get(name)
        if existing is None or query.get("generation") not in (None, str(existing.generation)):
            raise Refusal(404, f"No such object: {bucket}/{name}")
        check_preconditions(existing, query)
        return existing

    def page(self, bucket: str, query: dict[str, str]) -> dict[str, object]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        size = max(1, min(self.page_size, int(query.get("maxResults", PAGE))))
        after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        with self._lock:
            objects = dict(self._of(bucket))
        entries: dict[str, Object | None] = {}
        for name, item in objects.items():
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if query.get("endOffset") and name >= query["endOffset"]:
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                entries[name] = item
            else:
                entries[name[: cut + len(delimiter)]] = None
        # The service sorts by UTF-8 bytes, which gives the same order as code points.
        rest = [name for name in sorted(entries) if name > after or not after]
        document: dict[str, object] = {"kind": "storage#objects"}
        page_names = rest[:size]
        if items := [entry.resource() for name in page_names if (entry := entries[name])]:
            document["items"] = items
        if prefixes := [name for name in page_names if entries[name] is None]:
            document["prefixes"] = prefixes
        if len(rest) > size:
            document["nextPageToken"] = base64.urlsafe_b64encode(page_names[-1].encode()).decode()
        return document

    def _of(self, bucket: str) -> dict[str, Object]:
        if bucket not in self._objects:
            raise Refusal(404, "The specified bucket does not exist.")
        return self._objects[bucket]


def check_name(name: str) -> None:
    if not name or "\n" in name or "\r" in name or name in (".", ".."):
        raise Refusal(400, f"Invalid object name: {name!r}")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise Refusal(400, "The specified object name is too long.")


def check_preconditions(
    current: Object | None, query: dict[str, str], reading: bool = False
) -> None:
    """Refuse a request whose preconditions fail; with 304 if a reader has this generation."""
    numbers = {
        "Generation": current.generation if current else 0,
        "Metageneration": current.metageneration if current else 0,
    }
    for field_name, number in numbers.items():
        wanted = query.get(f"if{field_name}Match")
        if wanted is not None and int(wanted) != number:
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")
        unwanted = query.get(f"if{field_name}NotMatch")
        if unwanted is not None and int(unwanted) == number:
            raise Refusal(304 if reading else 412, "At least one of the pre-conditions failed.")
