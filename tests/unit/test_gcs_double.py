"""The double of Google Cloud Storage answers as Google's conformance server does.

The expected answers are those of googleapis/storage-testbench, except where the service itself
differs: digests that do not match (400), chunks that leave a gap (503), pages.
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlencode, urlsplit

import pytest

pytest.importorskip("google_crc32c")

from doubles.gcs import serving
from doubles.gcs.server import QUANTUM

OBJECTS = "/storage/v1/b/bucket/o"


class Client:
    def __init__(self, double):
        self.double = double

    def ask(self, method, path, body=None, headers=None, **query):
        if query:
            path += ("&" if "?" in path else "?") + urlencode(query, doseq=True)
        where = urlsplit(self.double.uri)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=200)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def document(self, method, path, **query):
        status, _, body = self.ask(method, path, **query)
        return status, json.loads(body)

    def insert(self, name, data, resource=None, **query):
        body = (
            b"--X\r\ncontent-type: application/json\r\n\r\n"
            + json.dumps({"name": name, **(resource or {})}).encode()
            + b"\r\n--X\r\ncontent-type: text/plain\r\n\r\n"
            + data
            + b"\r\n--X--"
        )
        kind = {"content-type": 'multipart/related; boundary="X"'}
        path = f"/upload{OBJECTS}?uploadType=multipart"
        status, _, answer = self.ask("POST", path, body, kind, **query)
        return status, json.loads(answer)

    def start(self, name, resource=None, **query):
        body = json.dumps({"name": name, **(resource or {})})
        path = f"/upload{OBJECTS}?uploadType=resumable"
        status, headers, _ = self.ask("POST", path, body, **query)
        assert status == 200
        where = urlsplit(headers["Location"])
        return f"{where.path}?{where.query}"

    def send(self, upload, data, span, **headers):
        fields = {"Content-Range": f"bytes {span}"}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        status, headers, body = self.ask("PUT", upload, data, fields)
        return status, headers["Range"], body


@pytest.fixture
def double():
    with serving("bucket") as running:
        yield running


@pytest.fixture
def client(double):
    return Client(double)


def test_what_an_object_says_of_itself(client):
    status, created = client.insert("a/ü b", b"hello", {"metadata": {"k": "v"}})
    assert status == 200
    assert created["size"] == "5"
    assert created["crc32c"] == "mnG7TA=="
    assert created["md5Hash"] == "XUFAKrxLKna5cZ2REBfFkg=="
    assert created["contentType"] == "text/plain"
    assert created["metageneration"] == "1"
    assert created["metadata"] == {"k": "v"}
    assert client.document("GET", f"{OBJECTS}/a%2F%C3%BC%20b") == (200, created)
    assert client.document("GET", f"{OBJECTS}/none")[0] == 404
    assert "bucket" in client.document("GET", "/storage/v1/b/none/o")[1]["error"]["message"]


def test_preconditions(client):
    _, created = client.insert("a", b"one")
    assert client.insert("a", b"two", ifGenerationMatch=0)[0] == 412
    assert client.insert("a", b"two", ifGenerationMatch=created["generation"])[0] == 200
    assert client.insert("a", b"three", ifGenerationMatch=created["generation"])[0] == 412
    assert client.insert("b", b"one", ifGenerationMatch=0)[0] == 200
    _, created = client.document("GET", f"{OBJECTS}/a")
    generation = int(created["generation"])
    assert client.ask("GET", f"{OBJECTS}/a", ifGenerationMatch=generation)[0] == 200
    assert client.ask("GET", f"{OBJECTS}/a", ifGenerationMatch=1)[0] == 412
    assert client.ask("GET", f"{OBJECTS}/a", ifGenerationNotMatch=generation)[0] == 304
    assert client.ask("GET", f"{OBJECTS}/a", ifMetagenerationMatch=2)[0] == 412
    assert client.ask("GET", f"{OBJECTS}/a", generation=1)[0] == 404
    assert client.ask("DELETE", f"{OBJECTS}/a", ifGenerationMatch=1)[0] == 412
    assert client.ask("DELETE", f"{OBJECTS}/a", ifGenerationMatch=generation)[0] == 204
    assert client.ask("DELETE", f"{OBJECTS}/a")[0] == 404


def patched(client, name, metadata, **query):
    body = json.dumps({"metadata": metadata})
    status, _, answer = client.ask("PATCH", f"{OBJECTS}/{name}", body, **query)
    return status, json.loads(answer)


def test_what_is_said_of_an_object_is_changed(client, double):
    _, created = client.insert("a", b"one", {"metadata": {"k": "v", "old": "x"}})
    double.buckets.grow_old("bucket", 1000.0)
    _, old = client.document("GET", f"{OBJECTS}/a")
    status, now = patched(client, "a", {"new": "y", "old": None})
    assert status == 200
    assert now["metadata"] == {"k": "v", "new": "y"}
    assert (now["generation"], now["metageneration"]) == (created["generation"], "2")
    assert now["timeCreated"] == old["timeCreated"]
    assert now["updated"] > old["updated"]
    assert patched(client, "a", {}, ifGenerationMatch=1)[0] == 412
    assert patched(client, "none", {})[0] == 404
    assert patched(client, "a", {}, projection="full")[0] == 403
    assert client.ask("DELETE", f"{OBJECTS}/a", ifMetagenerationMatch=1)[0] == 412
    assert client.ask("DELETE", f"{OBJECTS}/a", ifMetagenerationMatch=2)[0] == 204


def test_digests_are_checked(client):
    for resource in ({"crc32c": "AAAAAA=="}, {"md5Hash": "1B2M2Y8AsgTpgAmY7PhCfg=="}):
        assert client.insert("a", b"x", resource)[0] == 400
        assert client.send(client.start("a", resource), b"x", "0-0/1")[0] == 400
    upload = client.start("a")
    assert client.send(upload, b"x", "0-0/1", x_goog_hash="crc32c=AAAAAA==")[0] == 400
    assert client.document("GET", OBJECTS)[1] == {"kind": "storage#objects"}


def test_content_is_read_whole_and_in_ranges(client):
    client.insert("a", b"hello")
    path = f"{OBJECTS}/a?alt=media"
    status, headers, body = client.ask("GET", f"/download{path}")
    assert (status, body) == (200, b"hello")
    assert headers["X-Goog-Hash"] == "crc32c=mnG7TA==,md5=XUFAKrxLKna5cZ2REBfFkg=="
    assert headers["X-Goog-Stored-Content-Length"] == "5"
    for requested, part, returned in (
        ("1-2", b"el", "1-2"),
        ("3-", b"lo", "3-4"),
        ("-2", b"lo", "3-4"),
    ):
        status, headers, body = client.ask("GET", path, headers={"Range": f"bytes={requested}"})
        assert (status, body, headers["Content-Range"]) == (206, part, f"bytes {returned}/5")
    assert client.ask("GET", path, headers={"Range": "bytes=9-"})[0] == 416
    assert client.ask("GET", f"{OBJECTS}/none?alt=media")[2] == b"No such object: bucket/none"


def test_a_resumable_upload(client):
    upload, size = client.start("big"), 2 * QUANTUM
    first, second = b"a" * QUANTUM, b"b" * QUANTUM
    assert client.send(upload, b"", "*/*")[:2] == (308, None)
    for _ in range(2):  # The second request has no effect.
        assert client.send(upload, first, f"0-{QUANTUM - 1}/{size}")[:2] == (308, "bytes=0-262143")
    assert client.send(upload, b"", f"*/{size}")[:2] == (308, "bytes=0-262143")
    assert client.send(upload, second, f"{size}-{size + QUANTUM - 1}/*")[0] == 503
    for _ in range(2):
        assert client.send(upload, second, f"{QUANTUM}-{size - 1}/{size}")[0] == 200
    assert client.send(upload, b"", f"*/{size}")[0] == 200
    assert client.ask("GET", f"{OBJECTS}/big?alt=media")[2] == first + second
    assert client.send(upload + "x", b"", "*/*")[0] == 404


def test_a_resumable_upload_that_another_overtakes(client):
    upload = client.start("a", ifGenerationMatch=0)
    client.insert("a", b"other")
    assert client.send(upload, b"x", "0-0/1")[0] == 412


def names(document):
    return [item["name"] for item in document.get("items", [])], document.get("prefixes", [])


@pytest.mark.parametrize(
    ("query", "listed"),
    [
        ({"prefix": "l"}, (["l/a", "l/b/c", "l/b/d", "l/c", "lx"], [])),
        ({"prefix": "l/", "delimiter": "/"}, (["l/a", "l/c"], ["l/b/"])),
        ({"prefix": "l", "startOffset": "l/b", "endOffset": "l0"}, (["l/b/c", "l/b/d", "l/c"], [])),
        ({"prefix": "zz"}, ([], [])),
    ],
)
def test_lists(client, query, listed):
    for name in ("lx", "l/c", "l/b/d", "l/b/c", "l/a"):
        client.insert(name, b"")
    assert names(client.document("GET", OBJECTS, **query)[1]) == listed
    read: tuple[list, list] = ([], [])
    more: dict[str, str] = {}
    while True:
        _, page = client.document("GET", OBJECTS, **query, maxResults=2, **more)
        items, prefixes = names(page)
        assert len(items) + len(prefixes) <= 2
        read[0].extend(items)
        read[1].extend(prefixes)
        if "nextPageToken" not in page:
            break
        more = {"pageToken": page["nextPageToken"]}
    assert read == listed


def test_faults(client, double):
    double.fail("insert", status=503, times=2)
    assert [client.insert("a", b"x")[0] for _ in range(3)] == [503, 503, 200]
    double.fail("insert", lost=True)
    with pytest.raises(http.client.RemoteDisconnected):
        client.insert("b", b"x")
    assert double.content("bucket", "b") == b"x"
    client.insert("a", b"hello")
    double.fail("media", cut_after=3)
    with pytest.raises(http.client.IncompleteRead):
        client.ask("GET", f"{OBJECTS}/a?alt=media")
    upload, size = client.start("big"), QUANTUM + 10
    double.fail("chunk", cut_after=QUANTUM + 5)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
        client.send(upload, b"z" * size, f"0-{size - 1}/{size}")
    assert client.send(upload, b"", f"*/{size}")[:2] == (308, f"bytes=0-{QUANTUM - 1}")
    double.denied.add("storage.objects.list")
    assert "storage.objects.list" in client.document("GET", OBJECTS)[1]["error"]["message"]
    assert double.calls()["insert"] == 5
    assert [r.status for r in double.requests if r.call == "insert"] == [503, 503, 200, 0, 200]
