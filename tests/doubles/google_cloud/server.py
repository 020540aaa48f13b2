"""HTTP of the double, and the state of one project."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from doubles.google_cloud import schemas
from doubles.google_cloud.kube import Kube

Document = dict[str, Any]
PROJECT, NUMBER = "my-project", "123456789"
MACHINES = (
    *("e2-standard-4", "n2-standard-4", "ct6e-standard-4t", "ct5lp-hightpu-8t"),
    *("ct5lp-hightpu-4t", "g2-standard-4", "ct6e-standard-8t"),
)
POLLS = 2
"""How often an operation is asked for before it is done."""


class Killed(Exception):
    """Raised by a hook to drop the connection: the client is dead."""


class Refusal(Exception):
    """An error of Google's."""

    def __init__(self, code: int, status: str, message: str, reason: str = "") -> None:
        self.code = code
        details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}]
        self.body = {
            "error": {"code": code, "message": message, "status": status}
            | ({"details": details} if reason else {})
        }


class GoogleDouble:
    """One project.

    Attributes:
        changes: the requests that changed something, in their order.
        problems: what Google would not have understood.
        failing: the message with which GKE reports an operation as failed, by the name of its
            cluster or node pool.
        lag: how many requests GKE refuses after it was enabled, as if it were not.
        refusals: an error for requests, by the id of the method in the discovery document.
        on_change: called after each change, before it is answered.
    """

    def __init__(self, folder: Path) -> None:
        self.services = {"serviceusage.googleapis.com"}
        self.machines = set(MACHINES)
        self.quotas: dict[str, list[Document]] = {}
        self.buckets: dict[str, Document] = {}
        self.policies: dict[str, Document] = {}
        self.contents: dict[str, list[str]] = {}
        self.clusters: dict[str, Document] = {}
        self.operations: dict[str, Document] = {}
        self.kubes: dict[str, Kube] = {}
        self.changes: list[str] = []
        self.problems: list[str] = []
        self.failing: dict[str, str] = {}
        self.lag = 0
        self.refusals: dict[str, Refusal] = {}
        self.on_change: Callable[[str], None] = lambda _change: None
        self._polls: dict[str, int] = {}
        self._lock = threading.RLock()
        self._folder = folder
        self._plain = _Listener(self._answer, self.problems)
        self._secure = _Listener(self._answer_kube, self.problems, self._make_context())
        self.url = f"http://127.0.0.1:{self._plain.port}"

    def close(self) -> None:
        self._plain.close()
        self._secure.close()

    def environment(self) -> dict[str, str]:
        """Return the variables with which Google's libraries and gcloud find this double."""
        named = {"CONTAINER": "/", "SERVICEUSAGE": "/", "STORAGE": "/storage/v1/"}
        named |= {"COMPUTE": "/compute/v1/"}
        variables = {
            f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{self.url}{path}"
            for name, path in named.items()
        }
        return variables | {"GOOGLE_APPLICATION_CREDENTIALS": str(self._write_login())}

    def _write_login(self) -> Path:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        login = {
            "type": "service_account",
            "client_email": "ann@my-project.iam.gserviceaccount.com",
            "private_key": key.decode(),
            "private_key_id": "k1",
            "project_id": PROJECT,
            "token_uri": f"{self.url}/token",
        }
        path = self._folder / "login.json"
        path.write_text(json.dumps(login))
        return path

    def _make_context(self) -> ssl.SSLContext:
        import datetime
        import ipaddress

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube")])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(7)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.authority = base64.b64encode(pem).decode()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def serve_kube(self, name: str, context: str) -> Document:
        """Start an API server; return its kubeconfig."""
        self.kubes[name] = Kube()
        server = f"https://127.0.0.1:{self._secure.port}/{name}"
        cluster = {"server": server, "certificate-authority-data": self.authority}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": context, "cluster": cluster}],
            "users": [{"name": context, "user": {"token": "t"}}],
            "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        }

    # --- requests

    def _answer_kube(
        self, verb: str, target: str, headers: Any, body: bytes
    ) -> tuple[int, Document]:
        parts = urlsplit(target)
        _, name, *rest = parts.path.split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if not str(headers.get("Authorization", "")).startswith("Bearer "):
            return 401, {"kind": "Status", "message": "Unauthorized", "code": 401}
        with self._lock:
            kube = self.kubes[name]
            before = len(kube.applied)
            path = unquote("/" + "/".join(rest))
            code, answer = kube.answer(verb, path, query, headers.get("Content-Type", ""), body)
            changed = kube.applied[before:]
        for change in changed:
            self._note(f"apply {change}")
        return code, answer

    def _note(self, change: str) -> None:
        with self._lock:
            self.changes.append(change)
        self.on_change(change)

    def _answer(self, verb: str, target: str, headers: Any, body: bytes) -> tuple[int, Document]:
        parts = urlsplit(target)
        if parts.path == "/token":
            return 200, {"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}
        found = schemas.find_method(verb, parts.path)
        if found is None:
            self.problems.append(f"{verb} {target}: no such method")
            return 404, {"error": {"code": 404, "message": "Not Found"}}
        method, words = found
        query = parse_qs(parts.query, keep_blank_values=True)
        document = json.loads(body) if body else None
        problems = [f"{method.id}: no parameter {n}" for n in query.keys() - method.query]
        if method.request.endswith("Request") and method.api == "container.v1":
            document, more = _parse(method.request, body)
            problems += more
        problems += schemas.find_problems(method.api, method.request, document or {})
        if not headers.get("Authorization"):
            return 401, {"error": {"code": 401, "message": "no login"}}
        try:
            with self._lock:
                if problems:
                    self.problems += problems
                    raise Refusal(400, "INVALID_ARGUMENT", "; ".join(problems))
                if refusal := self.refusals.get(method.id):
                    raise refusal
                if words and words[0] != PROJECT and verb == "POST" and "clusters" in method.id:
                    raise Refusal(403, "PERMISSION_DENIED", f"no right in {words[0]}")
                count = len(self.changes)
                handler = getattr(self, method.id.replace(".", "_"))
                answer = handler(*map(unquote, words), query=query, body=document)
                if answer:
                    own = schemas.find_problems(method.api, method.response, answer)
                    self.problems += [f"the double's own answer: {p}" for p in own]
                changed = self.changes[count:]
        except Refusal as refusal:
            return refusal.code, refusal.body
        for change in changed:
            self.on_change(change)
        return 200, answer or {}

    # --- APIs

    def _of_project(self, name: str) -> None:
        if name != PROJECT:
            text = f"Permission denied on resource project {name}."
            raise Refusal(403, "PERMISSION_DENIED", text, "CONSUMER_INVALID")

    def serviceusage_services_batchGet(self, _kind, project, *, query, body):
        self._of_project(project)
        rows = [
            {
                "name": f"projects/{NUMBER}/services/{name.rpartition('/')[2]}",
                "parent": f"projects/{NUMBER}",
                "state": "ENABLED" if name.rpartition("/")[2] in self.services else "DISABLED",
            }
            for name in query["names"]
        ]
        return {"services": rows}

    def serviceusage_services_batchEnable(self, _kind, project, *, query, body):
        self._of_project(project)
        self.services |= set(body["serviceIds"])
        self.changes.append("enable")
        self._polls["enable"] = 0
        return {"name": "operations/enable", "done": False}

    def serviceusage_operations_get(self, name, *, query, body):
        self._polls[name] += 1
        return {"name": f"operations/{name}", "done": self._polls[name] >= POLLS}

    def serviceusage_services_consumerQuotaMetrics_get(
        self, _kind, project, service, metric, *, query, body
    ):
        if metric not in self.quotas:
            raise Refusal(404, "NOT_FOUND", f"no metric {metric}")
        limit = {"unit": "1/{project}/{region}", "quotaBuckets": self.quotas[metric]}
        return {"metric": metric, "consumerQuotaLimits": [limit]}

    def compute_machineTypes_list(self, project, zone, *, query, body):
        names = sorted(self.machines)
        start = int(query.get("pageToken", ["0"])[0])
        page = {"items": [{"name": name} for name in names[start : start + 3]]}
        return page | ({"nextPageToken": str(start + 3)} if start + 3 < len(names) else {})

    # --- buckets

    def storage_buckets_get(self, name, *, query, body):
        if name not in self.buckets:
            raise Refusal(404, "notFound", "The specified bucket does not exist.")
        return self.buckets[name]

    def storage_buckets_insert(self, *, query, body):
        self._of_project(query["project"][0])
        if body["name"] in self.buckets:
            raise Refusal(409, "conflict", "The requested bucket name is not available.")
        self.buckets[body["name"]] = body | {
            "etag": "e0",
            "kind": "storage#bucket",
            "projectNumber": NUMBER,
        }
        self.changes.append(f"bucket {body['name']}")
        return self.buckets[body["name"]]

    def storage_buckets_getIamPolicy(self, name, *, query, body):
        return self.policies.setdefault(name, {"etag": "e0", "version": 3, "bindings": []})

    def storage_buckets_setIamPolicy(self, name, *, query, body):
        policy = self.storage_buckets_getIamPolicy(name, query={}, body=None)
        if body.get("etag") != policy["etag"]:
            raise Refusal(412, "conditionNotMet", "The policy has changed.")
        running = [c for c in self.clusters.values() if c["status"] == "RUNNING"]
        if any("principal:" in m for b in body["bindings"] for m in b["members"]) and not running:
            raise Refusal(400, "invalid", "Identity Pool does not exist (my-project.svc.id.goog).")
        self.policies[name] = body | {"etag": f"e{int(policy['etag'][1:]) + 1}"}
        self.changes.append(f"grant {body['bindings'][-1]['members'][-1].rpartition('/ns/')[2]}")
        return self.policies[name]

    def storage_objects_list(self, name, *, query, body):
        return {"items": [{"name": each} for each in self.contents.get(name, [])[:2]]}

    def storage_objects_delete(self, bucket, name, *, query, body):
        self.contents[bucket].remove(name)

    def storage_folders_list(self, name, *, query, body):
        raise Refusal(409, "conflict", "The bucket has no hierarchical namespace.")

    def storage_buckets_delete(self, name, *, query, body):
        if self.contents.get(name):
            raise Refusal(409, "conflict", "The bucket you tried to delete is not empty.")
        del self.buckets[name]
        self.changes.append(f"remove bucket {name}")

    # --- GKE

    def _require_api(self) -> None:
        is_enabled = "container.googleapis.com" in self.services
        self.lag -= is_enabled
        if not is_enabled or self.lag >= 0:
            text = "Kubernetes Engine API has not been used in project 123456789 before."
            raise Refusal(403, "PERMISSION_DENIED", text, "SERVICE_DISABLED")

    def container_projects_locations_clusters_list(self, project, location, *, query, body):
        self._of_project(project)
        self._require_api()
        rows = [c for c in self.clusters.values() if location in ("-", c["location"])]
        return {"clusters": rows}

    def container_projects_locations_clusters_create(self, project, location, *, query, body):
        self._require_api()
        cluster = body["cluster"]
        name = cluster["name"]
        if name in self.clusters:
            text = f"Already exists: projects/{project}/zones/{location}/clusters/{name}."
            raise Refusal(409, "ALREADY_EXISTS", text)
        for pool in cluster.get("nodePools") or ():
            pool["status"] = "PROVISIONING"
        self.clusters[name] = cluster | {
            "status": "PROVISIONING",
            "location": location,
            "currentMasterVersion": "1.33.5-gke.1080000",
        }
        self.changes.append(f"cluster {name}")
        return self._begin("CREATE_CLUSTER", f"{location}/clusters/{name}", name)

    def container_projects_locations_clusters_delete(self, project, location, name, *, query, body):
        self._refuse_if_busy(name)
        self.clusters[name]["status"] = "STOPPING"
        self.changes.append(f"remove cluster {name}")
        return self._begin("DELETE_CLUSTER", f"{location}/clusters/{name}", name)

    def container_projects_locations_clusters_nodePools_create(
        self, project, location, name, *, query, body
    ):
        self._refuse_if_busy(name)
        pool, pools = body["nodePool"], self.clusters[name].setdefault("nodePools", [])
        if pool["name"] in [p["name"] for p in pools]:
            raise Refusal(409, "ALREADY_EXISTS", f"Already exists: {pool['name']}.")
        if pool["config"]["machineType"] not in self.machines:
            raise Refusal(400, "INVALID_ARGUMENT", "Machine type does not exist in the zone.")
        pools.append(pool | {"status": "PROVISIONING"})
        self.changes.append(f"pool {pool['name']}")
        target = f"{location}/clusters/{name}/nodePools/{pool['name']}"
        return self._begin("CREATE_NODE_POOL", target, pool["name"])

    def container_projects_locations_clusters_nodePools_delete(
        self, project, location, name, pool, *, query, body
    ):
        self._refuse_if_busy(name)
        self.changes.append(f"remove pool {pool}")
        target = f"{location}/clusters/{name}/nodePools/{pool}"
        return self._begin("DELETE_NODE_POOL", target, pool)

    def _refuse_if_busy(self, cluster: str) -> None:
        if cluster not in self.clusters:
            raise Refusal(404, "NOT_FOUND", f"Not found: clusters/{cluster}.")
        for operation in self.operations.values():
            if operation["status"] != "DONE" and f"/clusters/{cluster}" in operation["targetLink"]:
                text = f"Cluster is running incompatible operation {operation['name']}."
                raise Refusal(400, "FAILED_PRECONDITION", text)

    def _begin(self, kind: str, target: str, subject: str) -> Document:
        name = f"operation-{len(self.operations) + 1}"
        link = f"https://container.googleapis.com/v1/projects/{NUMBER}/zones/{target}"
        operation = {"name": name, "operationType": kind, "status": "RUNNING", "targetLink": link}
        self.operations[name] = operation
        self._polls[name] = 0
        return dict(operation)

    def container_projects_locations_operations_list(self, project, location, *, query, body):
        return {"operations": [dict(operation) for operation in self.operations.values()]}

    def container_projects_locations_operations_get(self, project, location, name, *, query, body):
        self._polls[name] += 1
        if self._polls[name] == POLLS:
            self._finish(self.operations[name])
        return dict(self.operations[name])

    def _finish(self, operation: Document) -> None:
        operation["status"] = "DONE"
        _, _, rest = operation["targetLink"].partition("/clusters/")
        name, _, pool = rest.partition("/nodePools/")
        cluster, kind = self.clusters[name], operation["operationType"]
        message = self.failing.pop(pool or name, "")
        if message:
            operation["error"] = {"code": 8, "message": message}
        status = "ERROR" if message else "RUNNING"
        if kind == "DELETE_CLUSTER":
            del self.clusters[name]
        elif kind == "DELETE_NODE_POOL":
            cluster["nodePools"] = [p for p in cluster["nodePools"] if p["name"] != pool]
        else:
            for each in cluster.get("nodePools") or ():
                if each["name"] == pool or not pool:
                    each["status"] = status
                    each["conditions"] = [{"message": message}] if message else []
        if kind == "CREATE_CLUSTER":
            cluster["status"] = status
            cluster |= {"conditions": [{"message": message}]} if message else {}
            entry = self.serve_kube(name, name)["clusters"][0]["cluster"]
            cluster["endpoint"] = entry["server"].removeprefix("https://")
            authority = entry["certificate-authority-data"]
            cluster["masterAuth"] = {"clusterCaCertificate": authority}


def _parse(kind: str, body: bytes) -> tuple[Document, list[str]]:
    """Parse a request to GKE with google-cloud-container's own type. Return it as GKE answers it,
    without the fields that hold their default."""
    from google.cloud import container_v1

    message = getattr(container_v1, kind)
    try:
        parsed = message.from_json(body.decode())
    except Exception as error:
        return {}, [f"{kind}: {error}"]
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message.pb(parsed)), []


class _Listener:
    """A server on a free port."""

    def __init__(
        self,
        answer: Callable[..., Any],
        problems: list[str],
        context: ssl.SSLContext | None = None,
    ) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    code, document = answer(self.command, self.path, self.headers, body)
                except Killed:
                    self.close_connection = True
                    return
                except Exception:
                    text = traceback.format_exc()
                    problems.append(f"the double itself failed: {text}")
                    code, document = 500, {"error": {"code": 500, "message": text}}
                data = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = reply

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # The client has disconnected.

        self._server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(folder: Path) -> Iterator[GoogleDouble]:
    """Yield a double, and close it."""
    double = GoogleDouble(folder)
    try:
        yield double
    finally:
        double.close()
