"""Data sets of the hub that are not there are refused before a job is created."""

from __future__ import annotations

import dataclasses
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from laptop_fakes import FakeBackend, plan, planned

from kinetic import errors
from kinetic._client import submission
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Dataset
from kinetic._datasets import hub_check
from kinetic._datasets.hub_check import HubLogin
from kinetic._store.local import LocalStore

REPO = "/api/datasets/owner/images"
NOBODY = HubLogin("", is_known=True)


@pytest.fixture
def hub(monkeypatch):
    """A hub with one public and one private data set; `answer` takes the place of all answers."""
    hub_check._asked.clear()

    class Hub(BaseHTTPRequestHandler):
        answer, asked = None, []

        def do_GET(self):
            path, token = urlsplit(self.path).path, self.headers.get("Authorization", "")
            self.asked.append((path, token))
            code, headers = self.answer or self.said(path, token)
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def said(self, path, token):
            if token and token != "Bearer hf_me":
                return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
            if path in (REPO, f"{REPO}/revision/main", f"{REPO}/revision/a%2Fb"):
                return 200, {}
            if path.startswith(REPO):
                return 404, {"X-Error-Code": "RevisionNotFound"}
            if path == "/api/datasets/owner/mine" and token:
                return 200, {}
            if path == "/api/datasets/owner/renamed":
                return 307, {"Location": "/api/datasets/owner/mine"}
            return (404, {"X-Error-Code": "RepoNotFound"}) if token else (401, {})

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        Hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("HF_ENDPOINT", Hub.url)
        yield Hub
        server.shutdown()
        thread.join()


def check(hub, source, who=NOBODY, **variables):
    hub_check.check(source, who, {"HF_ENDPOINT": hub.url, **variables})


@pytest.mark.parametrize("query", ["", "?revision=main", "?revision=a/b", "?split=train"])
def test_what_is_there_passes_and_is_asked_for_once(hub, query):
    for _ in range(3):
        check(hub, f"hf://owner/images{query}")
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("source", "token", "said"),
    [
        ("hf://owner/none", "", "no such data set, or it is private"),
        ("hf://owner/none", "hf_me", "no such data set, or it is private"),
        ("hf://owner/mine", "", "secrets="),
        ("hf://owner/images?revision=v9", "", "hf://owner/images has no revision 'v9'"),
        ("hf://owner/images", "hf_old", "does not accept the token"),
    ],
)
def test_what_is_not_there_is_refused(hub, source, token, said):
    for _ in range(2):
        with pytest.raises(errors.UsageError, match=said) as caught:
            check(hub, source, HubLogin(token, is_known=True))
        assert source in str(caught.value)
        assert not token or token not in str(caught.value)


def test_a_token_opens_what_is_private(hub):
    check(hub, "hf://owner/mine", HubLogin("hf_me", is_known=True))


def test_hosts_that_may_have_a_token_of_their_own_are_asked(hub):
    check(hub, "hf://owner/mine", HubLogin("", is_known=False))
    with pytest.raises(errors.UsageError, match="revision"):
        check(hub, "hf://owner/images?revision=v9", HubLogin("", is_known=False))


@pytest.mark.parametrize("code", [403, 404, 429, 500, 503])
def test_what_cannot_be_told_is_left_to_the_hosts(hub, code):
    hub.answer = (code, {})
    for _ in range(3):
        check(hub, "hf://owner/none")
    assert len(hub.asked) == 1


def test_a_token_goes_to_no_other_address(hub):
    check(hub, "hf://owner/renamed", HubLogin("hf_me", is_known=True))
    assert [token for _, token in hub.asked] == ["Bearer hf_me", ""]


def test_a_hub_that_is_out_of_reach(hub):
    check(hub, "hf://owner/none", HF_ENDPOINT="http://127.0.0.1:9")
    check(hub, "hf://owner/none", HF_ENDPOINT="nonsense")
    check(hub, "hf://owner/none", HF_HUB_OFFLINE="1")
    assert hub.asked == []


def test_as_whom_hosts_will_ask(tmp_path):
    (tmp_path / "token").write_text("hf_file\n")
    here = {"HF_TOKEN": "hf_env", "HF_HOME": str(tmp_path)}
    cluster = plan(place=Place("gke"))
    own = plan(place=Place("gke", image="ghcr.io/me/it"))
    cases = [
        (plan(), {}, here, HubLogin("hf_env", is_known=True)),
        (plan(), {}, {"HF_HOME": str(tmp_path)}, HubLogin("hf_file", is_known=True)),
        (plan(), {}, {"HOME": str(tmp_path)}, HubLogin("", is_known=True)),
        (plan(), {"HF_TOKEN": "hf_s"}, here, HubLogin("hf_s", is_known=True)),
        (cluster, {}, here, HubLogin("", is_known=True)),
        (own, {}, here, HubLogin("", is_known=False)),
        (own, {"HF_TOKEN": "hf_s"}, {}, HubLogin("hf_s", is_known=True)),
    ]
    for about, secrets, variables, wanted in cases:
        assert hub_check.login(about, secrets, variables) == wanted


def test_nothing_is_written_for_data_that_is_not_there(hub, tmp_path):
    payload = b"payload"
    about = plan(payload=Blob("ab" * 32, len(payload)), place=Place("gke"))
    data = (Dataset(source="hf://owner/mine", is_dir=True),)
    shipped = planned(dataclasses.replace(about, data=data), payload)
    store = LocalStore(tmp_path / "store")
    backend = FakeBackend(store)
    with pytest.raises(errors.UsageError, match="it is private"):
        submission.submit(shipped, backend, store)
    assert not (tmp_path / "store").exists()
    secret = dataclasses.replace(shipped, secrets={"HF_TOKEN": "hf_me"})
    submission.submit(secret, backend, store)
    assert backend.calls[-1] == "submit"
