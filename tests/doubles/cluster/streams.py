"""Watches and logs, sent in pieces. Now and then a piece is empty, to find lost clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from doubles.cluster.collector import TERMINAL
from doubles.cluster.containers import Log
from doubles.cluster.faults import Stream
from doubles.cluster.kinds import PODS, Resource
from doubles.cluster.kubelet import Kubelet
from doubles.cluster.objects import Object, dig
from doubles.cluster.problems import Cause, bad_request, invalid, not_found, refusal, status
from doubles.cluster.server import Answer, Request
from doubles.cluster.store import Change, Store, event_line
from doubles.cluster.timings import Timings

CHECK_S = 0.2
"""Seconds between checks of a quiet stream for a disconnected client or a fault."""
DEFAULT_TIMEOUT_S = 2400.0
END_OF_LIST = "k8s.io/initial-events-end"
Test = Callable[[Object], bool]


def watch(
    store: Store,
    resource: Resource,
    namespace: str,
    query: dict[str, str],
    matches: Test,
    installed: Callable[[], bool],
    timings: Timings,
    stream: Stream,
) -> Iterator[bytes]:
    """Yield the events of a watch."""
    until = time.monotonic() + float(query.get("timeoutSeconds") or DEFAULT_TIMEOUT_S)
    bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
    start = query.get("resourceVersion", "")

    def concerns(obj: Object) -> bool:
        return namespace in ("", obj["metadata"].get("namespace", "")) and matches(obj)

    with store.lock:
        position = store.version
        first: list[bytes] = []
        if start in ("", "0") or query.get("sendInitialEvents") == "true":
            held = [obj for obj in store.all(resource, namespace) if matches(obj)]
            first = [event_line("ADDED", obj) for obj in held]
        elif int(start) <= position:
            position = int(start)
        else:
            position = int(start)
    if query.get("sendInitialEvents") == "true" and bookmarks:
        first.append(_bookmark(resource, position, end=True))
    if first:
        yield b"".join(first)
    next_bookmark = time.monotonic() + timings.bookmark_s
    while (now := time.monotonic()) < until and not store.closed and installed():
        with store.lock:
            changes = store.since(resource, position)
            at = max(store.version, position)
            oldest = store.oldest(resource)
        if changes is None:
            message = f"too old resource version: {position} ({oldest})"
            yield event_line("ERROR", status(410, "Expired", message))
            return
        lines = [line for change in changes if (line := _line(change, concerns))]
        position = at
        if bookmarks and now >= next_bookmark:
            lines.append(_bookmark(resource, position))
            next_bookmark = now + timings.bookmark_s
        yield b"".join(lines)
        if not lines:
            nap = min(CHECK_S, until - now)
            if bookmarks:
                nap = min(nap, next_bookmark - now)
            store.wait(position, max(nap, 0.001))


def _line(change: Change, concerns: Test) -> bytes | None:
    """Return the line that a watch with these selectors gets for a change; None for no line."""
    now = concerns(change.object)
    before = change.before is not None and concerns(change.before)
    if change.type == "MODIFIED" and now != before:
        return event_line("ADDED" if now else "DELETED", change.object)
    if change.type == "DELETED":
        return change.line() if before or now else None
    return change.line() if now else None


def _bookmark(resource: Resource, version: int, *, end: bool = False) -> bytes:
    meta: Object = {"resourceVersion": str(version)}
    if end:
        meta["annotations"] = {END_OF_LIST: "true"}
    obj = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}
    return event_line("BOOKMARK", obj)


def log(
    store: Store,
    kubelet: Kubelet,
    request: Request,
    namespace: str,
    name: str,
    open_stream: Callable[[], Stream],
) -> Answer:
    """Return a container's log up to now, or until the container ends."""
    pod, query = store.get(PODS, namespace, name), request.query
    if pod is None:
        raise not_found(PODS, name)
    _check_options(name, query)
    if not pod["spec"].get("nodeName"):
        return Answer(204)
    index = _container(pod, query.get("container", ""))
    container = pod["spec"]["containers"][index]["name"]
    node = pod["spec"]["nodeName"]
    if node in kubelet.lost_nodes:
        url = f"https://{node}:10250/containerLogs/{namespace}/{name}/{container}"
        raise refusal(500, "", f'Get "{url}": dial tcp: connect: connection refused')
    logs = kubelet.log_of(pod["metadata"]["uid"], index)
    previous = query.get("previous") in ("true", "1")
    if previous and len(logs) < 2:
        message = f'previous terminated container "{container}" in pod "{name}" not found'
        raise bad_request(message)
    held = dig(pod, "status", "containerStatuses", index, "state", default={})
    waiting = dig(held, "waiting", "reason")
    if not previous and (not logs or (waiting and waiting != "CrashLoopBackOff")):
        if pod["status"].get("phase") in TERMINAL or "terminated" in held:
            return Answer(200, pieces=iter_once(b""), content_type="text/plain")
        why = waiting or "ContainerCreating"
        why = {"ErrImagePull": "image can't be pulled"}.get(why, why)
        why = {"ImagePullBackOff": "trying and failing to pull image"}.get(why, why)
        message = f'container "{container}" in pod "{name}" is waiting to start: {why}'
        raise bad_request(message)
    follow = query.get("follow") in ("true", "1")
    stream = open_stream() if follow else None
    pieces = _pieces(logs[-2 if previous else -1], query, follow, kubelet, node)
    return Answer(200, pieces=pieces, content_type="text/plain", stream=stream)


def iter_once(piece: bytes) -> Iterator[bytes]:
    yield piece


def _pieces(
    held: Log, query: dict[str, str], follow: bool, kubelet: Kubelet, node: str
) -> Iterator[bytes]:
    since_ns = 0
    if text := query.get("sinceTime"):
        from doubles.cluster.objects import seconds

        since_ns = int(seconds(text)) * 1_000_000_000
    elif text := query.get("sinceSeconds"):
        since_ns = time.time_ns() - int(text) * 1_000_000_000
    tail = query.get("tailLines")
    bytes_left = int(query["limitBytes"]) if "limitBytes" in query else None
    for piece in held.read(
        timestamps=query.get("timestamps") in ("true", "1"),
        tail=int(tail) if tail is not None else None,
        since_ns=since_ns,
        follow=follow,
    ):
        if node in kubelet.lost_nodes:
            return
        if bytes_left is not None:
            yield piece[:bytes_left]
            bytes_left = max(bytes_left - len(piece), 0)
        else:
            yield piece
        if bytes_left == 0:
            return


def _check_options(name: str, query: dict[str, str]) -> None:
    options = Resource("", "v1", "pods", "PodLogOptions")
    causes: list[Cause] = []
    if "stream" in query:
        message = "Forbidden: may not be specified"
        causes.append(Cause("stream", message, "FieldValueForbidden"))
    if (value := query.get("sinceSeconds")) is not None and int(value) <= 0:
        causes.append(Cause("sinceSeconds", f"Invalid value: {value}: must be greater than 0"))
    if (value := query.get("tailLines")) is not None and int(value) < 0:
        message = f"Invalid value: {value}: must be greater than or equal to 0"
        causes.append(Cause("tailLines", message))
    if (value := query.get("limitBytes")) is not None and int(value) <= 0:
        causes.append(Cause("limitBytes", f"Invalid value: {value}: must be greater than 0"))
    if "sinceSeconds" in query and "sinceTime" in query:
        message = "Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified"
        causes.append(Cause("[]", message, "FieldValueForbidden"))
    if causes:
        raise invalid(options, name, causes)


def _container(pod: Object, wanted: str) -> int:
    name = pod["metadata"]["name"]
    names = [c["name"] for c in pod["spec"]["containers"]]
    if not wanted:
        if len(names) > 1:
            message = f"a container name must be specified for pod {name}, choose one of:"
            raise bad_request(f"{message} [{' '.join(names)}]")
        return 0
    if wanted not in names:
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    return names.index(wanted)
