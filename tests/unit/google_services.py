"""A double of Cloud Build with its buckets, logs and registries, over HTTP, as Google documents it.
These tests have never called the services themselves.
Each build passes through the states that a test lists.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse

import pytest

pytest.importorskip("google.auth")

from google.auth.credentials import Credentials

from kinetic._backends.kubernetes.cloud_build import Addresses
from kinetic._backends.kubernetes.google_calls import GoogleCalls

LOG = "https://console.example/builds/"


class Login(Credentials):
    """Credentials that get a new token at each refresh: t1, t2, …"""

    def __init__(self):
        super().__init__()
        self.number, self.token = 0, "t0"

    def refresh(self, _request):
        self.number += 1
        self.token = f"t{self.number}"


def calls():
    """Return `GoogleCalls` that renew their token and do not pause between tries."""
    return GoogleCalls(Login(), first_pause_s=0.0)


class Google:
    """A server for one Google Cloud project. `trouble` lists answers (code, document) that it gives
    before all others; `refusals` maps the beginning of a path to the answer."""

    def __init__(self):
        self.calls, self.objects, self.images, self.builds = [], {}, set(), []
        self.states, self.trouble, self.requests = ["QUEUED", "WORKING", "SUCCESS"], [], []
        self.refusals, self.tokens, self.log = {}, None, ["Step 1", "no such package: frobnicate"]
        self.permissions = ["storage.objects.create", "storage.objects.get"]
        self.pushes, self.lock = True, threading.Lock()
        google = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def reply(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proof = self.headers["Authorization"]
                with google.lock:
                    google.calls.append((self.command, self.path, proof))
                    code, document, headers = google.respond(self.command, self.path, proof, body)
                data = json.dumps(document).encode()
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = reply

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.addresses = Addresses(*[self.url] * 5)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def paths(self, method=""):
        return [path.partition("?")[0] for each, path, _ in self.calls if each.startswith(method)]

    def build_posts(self):
        return [path for path in self.paths("POST") if path.endswith("/builds")]

    def respond(self, method, target, proof, body):
        path, _, query = target.partition("?")
        if self.trouble:
            return (*self.trouble.pop(0), {})[:3]
        for start, answer in self.refusals.items():
            if path.startswith(start):
                return (*answer, {})[:3]
        if self.tokens is not None and proof.startswith("Bearer") and proof not in self.tokens:
            return 401, {"error": {"message": "token expired"}}, {}
        options = dict(urllib.parse.parse_qsl(query))
        code, document = self.answer(method, path, options, body)
        return code, document, {}

    def answer(self, method, path, options, body):
        if path.startswith("/upload/"):
            return self.store_upload(path.split("/")[5], options, body)
        if path.startswith("/v2/entries"):
            lines = [{"textPayload": f"{line}\n"} for line in reversed(self.log)]
            return 200, {"entries": lines[: json.loads(body)["pageSize"]]}
        if path.startswith("/v2/"):
            return (200 if path in self.images else 404), {}
        if path.endswith("/iam/testPermissions"):
            return 200, {"permissions": self.permissions}
        if "/repositories/" in path:
            return 200, {"format": "DOCKER"}
        if path.endswith("/builds"):
            return self.create_build(body) if method == "POST" else (200, self.list_builds(options))
        if path.endswith(":cancel"):
            self.build(path.rpartition("/")[2].removesuffix(":cancel"))["status"] = "CANCELLED"
            return 200, {}
        return 200, self.advance(self.build(path.rpartition("/")[2]))

    def store_upload(self, bucket, options, body):
        assert options["ifGenerationMatch"] == "0"
        if (bucket, options["name"]) in self.objects:
            return 412, {}
        self.objects[bucket, options["name"]] = body
        return 200, {}

    def create_build(self, body):
        request = json.loads(body)
        self.requests.append(request)
        number = len(self.builds) + 1
        build = {
            **{"id": f"b{number}", "status": self.states[0], "logUrl": f"{LOG}b{number}"},
            **{"images": request["images"], "tags": request["tags"]},
            **{"createTime": f"2026-01-01T00:00:{number:02}Z", "left": self.states[1:]},
        }
        self.builds.append(build)
        return 200, {"metadata": {"build": self.finish(build)}}

    def list_builds(self, options):
        tag = options["filter"]
        builds = [build for build in self.builds if f'tags="{build["tags"][1]}"' == tag]
        return {"builds": builds[: int(options["pageSize"])]} if builds else {}

    def build(self, build_id):
        return next(build for build in self.builds if build["id"] == build_id)

    def advance(self, build):
        if build["status"] != "CANCELLED" and build["left"]:
            build["status"] = build["left"].pop(0)
        return self.finish(build)

    def finish(self, build):
        if build["status"] == "FAILURE":
            build["failureInfo"] = {"detail": "step 0 exited with 1"}
        if build["status"] == "SUCCESS" and self.pushes:
            self.images |= {path_of(uri) for uri in build["images"]}
        return build


def path_of(uri):
    name, _, tag = uri.partition("/")[2].rpartition(":")
    return f"/v2/{name}/manifests/{tag}"
