"""Which cluster, and who asks: from kubeconfig files, never written."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinetic._backends.kubernetes import cluster, credentials, kubeconfig
from kinetic._backends.kubernetes.credentials import Credentials, proof_of
from kinetic._backends.kubernetes.kubeconfig import Access, choose, find, read
from kinetic._client.client import client_of
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic.errors import PreflightError

NAMES = ("gke_p_us-east5-b_tpu", "gke_p_us-west1-a_tpu", "gke_q_us-east5-b_dev", "minikube")


def config_file(path: Path, *names: str, current: str = "", **user: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": current,
                "contexts": [
                    {"name": n, "context": {"cluster": f"{n}-c", "user": "me", "namespace": "ml"}}
                    for n in names
                ],
                "clusters": [
                    {"name": f"{n}-c", "cluster": {"server": f"https://{n}.example.com/"}}
                    for n in names
                ],
                "users": [{"name": "me", "user": user}],
            }
        )
    )
    return path


@pytest.mark.parametrize(
    ("cluster", "project", "zone", "chosen"),
    [
        ("", "", "", "minikube"),
        ("minikube", "", "", "minikube"),
        ("minikube-c", "", "", "minikube"),
        ("dev", "", "", "gke_q_us-east5-b_dev"),
        ("tpu", "p", "us-west1-a", "gke_p_us-west1-a_tpu"),
        ("tpu", "", "us-east5-b", "gke_p_us-east5-b_tpu"),
        ("gke_p_us-east5-b_tpu", "", "", "gke_p_us-east5-b_tpu"),
    ],
)
def test_a_cluster_is_named_as_people_do(
    tmp_path: Path, cluster: str, project: str, zone: str, chosen: str
) -> None:
    config = read([config_file(tmp_path / "config", *NAMES, current="minikube")])
    assert choose(config, cluster=cluster, project=project, zone=zone) == chosen


@pytest.mark.parametrize(
    ("cluster", "project", "words"),
    [
        ("tpu", "p", "Several contexts"),
        ("nope", "p", "get-credentials nope --project p"),
        ("tpu", "q", "No context of"),
        ("", "", "the current context of"),
    ],
)
def test_a_cluster_that_cannot_be_told(
    tmp_path: Path, cluster: str, project: str, words: str
) -> None:
    config = read([config_file(tmp_path / "config", *NAMES)])
    with pytest.raises(PreflightError, match="context") as caught:
        choose(config, cluster=cluster, project=project)
    assert words in str(caught.value)


def test_several_files_are_one_and_none_is_written(tmp_path: Path) -> None:
    first = config_file(tmp_path / "a" / "config", "one", token="t1")
    second = config_file(tmp_path / "b" / "config", "one", "two", current="two", token="t2")
    before = [p.read_bytes() for p in (first, second)]
    missing = tmp_path / "missing"
    access = find({"KUBECONFIG": os.pathsep.join(map(str, (first, missing, second)))})
    assert (access.server, access.context) == ("https://two.example.com", "two")
    assert access.namespace == "ml"
    assert proof_of(access, {}, 0).authorization == "Bearer t1"  # the first user of that name
    assert [p.read_bytes() for p in (first, second)] == before
    assert "t1" not in repr(access)
    assert "t1" not in repr(proof_of(access, {}, 0))


def test_certificates_are_read_inline_and_beside_the_file(tmp_path: Path) -> None:
    path = config_file(tmp_path / "config", "one", current="one")
    document = yaml.safe_load(path.read_text())
    document["clusters"][0]["cluster"]["certificate-authority"] = "ca.pem"
    inline = base64.b64encode(b"CERT").decode()
    document["users"][0]["user"] = {"client-certificate-data": inline, "client-key": "key.pem"}
    path.write_text(yaml.safe_dump(document))
    (tmp_path / "ca.pem").write_bytes(b"CA")
    (tmp_path / "key.pem").write_bytes(b"KEY")
    access = find({"KUBECONFIG": str(path)})
    proof = proof_of(access, {}, 0)
    assert (access.ca, proof.certificate, proof.key) == (b"CA", b"CERT", b"KEY")
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(PreflightError, match="certificate-authority"):
        find({"KUBECONFIG": str(path)})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    with pytest.raises(PreflightError, match="No kubeconfig was found") as caught:
        find({"KUBECONFIG": str(path)}, cluster="tpus")
    assert str(path) in str(caught.value)
    assert "get-credentials tpus" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [\n\n", "is no YAML: while parsing a flow node did not find"),
        ("- 1", "holds no mapping"),
        ("", "No kubeconfig was found"),
        ("contexts: abc", "The contexts of"),
        ("contexts: 5", "The contexts of"),
        ("users: {name: me}", "The users of"),
        ("clusters: [one]", "The clusters of"),
        ("clusters: [{name: one, cluster: two}]", "The clusters of"),
        ("{current-context: [one], contexts: [{name: two}]}", "names ['one']"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(PreflightError) as caught:
        find({"KUBECONFIG": str(path)})
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_relative_paths_stay_good_when_the_program_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file(tmp_path / "config", "one", current="one", exec={"command": "./login"})
    plugin(tmp_path / "login", f"printf '%s' '{credential('abc')}'")
    monkeypatch.chdir(tmp_path)
    access = find({"KUBECONFIG": f"none{os.pathsep}config"})
    monkeypatch.chdir("/")
    assert proof_of(access, {"PATH": os.defpath}, 0).authorization == "Bearer abc"
    assert kubeconfig.read_again(access) == access


def test_who_has_no_home_has_no_kubeconfig() -> None:
    assert kubeconfig.paths_of({"HOME": "~nobody-of-this-name"})


def test_a_pod_uses_its_own_account(tmp_path: Path) -> None:
    for name, text in (("token", "secret\n"), ("ca.crt", "CA"), ("namespace", "ml\n")):
        (tmp_path / name).write_text(text)
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    access = kubeconfig.in_cluster(variables, tmp_path)
    assert access is not None
    assert (access.server, access.namespace, access.ca) == ("https://10.0.0.1:443", "ml", b"CA")
    assert kubeconfig.in_cluster({}, tmp_path) is None
    clock = iter(range(0, 1000, 100))
    own = Credentials(access, {}, lambda: next(clock))
    assert own.proof().authorization == "Bearer secret"
    (tmp_path / "token").write_text("newer")
    assert own.proof().authorization == "Bearer newer"


def plugin(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def access_with(command: str, **more: Any) -> Access:
    entry = {"command": command, "apiVersion": "client.authentication.k8s.io/v1", **more}
    return Access("https://x", context="one", user={"exec": entry})


def credential(token: str, expires: str = "") -> str:
    status = {"token": token, **({"expirationTimestamp": expires} if expires else {})}
    return json.dumps({"kind": "ExecCredential", "status": status})


def test_a_plugin_logs_in_and_is_asked_again_before_its_token_expires(tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = plugin(
        tmp_path / "login",
        f'echo "$KUBERNETES_EXEC_INFO" >> {count}; test "$EXTRA" = yes || exit 1\n'
        f"printf '%s' '{credential('abc', '1970-01-01T01:00:00Z')}'",
    )
    access = access_with(command, env=[{"name": "EXTRA", "value": "yes"}], interactiveMode="Never")
    now = 0.0
    own = Credentials(access, {"PATH": os.defpath}, lambda: now)
    first = own.proof()
    assert first.authorization == "Bearer abc"
    assert own.proof() is first
    now = 3600 - 30
    assert own.proof() is not first
    asked = [json.loads(line) for line in count.read_text().splitlines()]
    assert len(asked) == 2
    assert asked[0]["kind"] == "ExecCredential"
    assert asked[0]["spec"]["interactive"] is False


def test_credentials_that_were_refused_are_replaced_once_for_all_threads(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = f"echo x >> {count}; printf '%s' '{credential('abc')}'"
    access = access_with(plugin(tmp_path / "login", script))
    own = Credentials(access, {"PATH": os.defpath}, lambda: 0.0)
    old = own.proof()
    new = own.renew_proof(old)
    assert own.renew_proof(old) is new
    assert count.read_text() == "x\nx\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo please log in >&2; exit 3", "(exit code 3): please log in"),
        ("echo hello", "printed no ExecCredential"),
        ("echo '{\"status\": {}}'", "no token and no certificate"),
    ],
)
def test_a_plugin_that_fails_says_why(tmp_path: Path, script: str, words: str) -> None:
    access = access_with(plugin(tmp_path / "login", script))
    with pytest.raises(PreflightError) as caught:
        proof_of(access, {"PATH": os.defpath}, 0)
    assert words in str(caught.value)


def test_what_a_plugin_asks_of_its_user_is_told_while_it_waits(tmp_path: Path) -> None:
    """It waits until it has been heard."""
    heard = tmp_path / "heard"
    script = (
        f"echo open https://example.com >&2; printf 'code: ' >&2\n"
        f"while [ ! -e {heard} ]; do sleep 0.05; done\nprintf '%s' '{credential('abc')}'"
    )
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if line == "code:":
            heard.touch()

    command = [plugin(tmp_path / "login", script)]
    ran = credentials.run_plugin(
        command, {"PATH": os.defpath}, tell, interactive=False, limit_s=120, quiet_s=0
    )
    assert told == ["open https://example.com", "code:"]
    assert (ran.code, ran.said) == (0, b"open https://example.com\ncode: ")
    assert json.loads(ran.output)["status"] == {"token": "abc"}


def test_a_plugin_that_ends_soon_has_asked_nobody(tmp_path: Path) -> None:
    script = f"echo a newer version is there >&2; printf '%s' '{credential('abc')}'"
    ran = credentials.run_plugin(
        [plugin(tmp_path / "login", script)],
        {"PATH": os.defpath},
        pytest.fail,
        interactive=False,
        limit_s=120,
        quiet_s=120,
    )
    assert ran.code == 0


def test_a_plugin_that_never_ends_is_given_up_and_killed(tmp_path: Path) -> None:
    path = plugin(tmp_path / "login", f"echo $$ > {tmp_path / 'pid'}; exec sleep 1000")
    with pytest.raises(subprocess.TimeoutExpired, match="login"):
        credentials.run_plugin(
            [path], {"PATH": os.defpath}, pytest.fail, interactive=False, limit_s=0.5
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_plugin_that_leaves_somebody_with_its_pipes_is_not_waited_for(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {left}; printf '%s' '{credential('abc')}'"
    try:
        proof = proof_of(access_with(plugin(tmp_path / "login", script)), {"PATH": os.defpath}, 0)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert proof.authorization == "Bearer abc"


def test_a_plugin_that_must_ask_its_user_needs_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = plugin(tmp_path / "login", f"printf '%s' '{credential('abc')}'")
    variables = {"PATH": os.defpath}
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PreflightError, match="asks its user each time, and there is no terminal"):
        proof_of(access_with(command, interactiveMode="Always"), variables, 0)
    proof = proof_of(access_with(command, interactiveMode="IfAvailable"), variables, 0)
    assert proof.authorization == "Bearer abc"


def test_a_plugin_that_is_not_installed_comes_with_its_hint() -> None:
    access = access_with("no-such-login", installHint="Install it with x.")
    with pytest.raises(PreflightError, match=r"not installed\. Install it with x\."):
        proof_of(access, {"PATH": "/nowhere"}, 0)


@pytest.mark.parametrize(
    "user",
    [
        {"exec": "login"},
        {"tokenFile": 5},
        {"client-certificate-data": 5},
        {"token": "two\nlines"},
        {"token": "a\u20ac"},
        {"token": "a", "as": "two\nlines"},
        {"token": "a", "as-groups": 5},
        {"exec": {"command": "/bin/sh", "args": 5}},
        {"exec": {"command": "/bin/sh", "env": "abc"}},
        {"exec": {"command": "/bin/sh", "env": [{"name": "A", "value": "\0"}]}},
        {"exec": {"command": "/bin/echo", "args": [credential("two\nlines")]}},
    ],
)
def test_a_user_that_is_malformed_is_named(user: Any) -> None:
    access = Access("https://x", context="one", user=user)
    with pytest.raises(PreflightError, match=r"kubeconfig"):
        proof_of(access, {"PATH": os.defpath}, 0)


def test_tokens_come_without_the_end_of_their_line() -> None:
    access = Access("https://x", user={"token": "abc\n"})
    assert proof_of(access, {}, 0).authorization == "Bearer abc"


def test_other_ways_to_log_in() -> None:
    def of(**user: Any) -> str:
        return proof_of(Access("https://x", user=user), {}, 0).authorization

    assert of() == ""
    assert of(username="me", password="pw") == f"Basic {base64.b64encode(b'me:pw').decode()}"
    with pytest.raises(PreflightError, match="cannot be read"):
        of(tokenFile="/no/such/file")
    assert (
        of(**{"auth-provider": {"name": "oidc", "config": {"id-token": "abc\n"}}}) == "Bearer abc"
    )
    with pytest.raises(PreflightError, match="auth-provider azure, which is no longer"):
        of(**{"auth-provider": {"name": "azure"}})
    assert credentials.EARLY_S > 0


def test_a_job_stays_where_its_submission_found_the_current_context(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectx` and `kubens` are for the next one: a job that its reader looked for in another
    namespace was judged to be removed."""
    path = config_file(tmp_path / "config", "one", "two", current="one")
    monkeypatch.setenv("KUBECONFIG", str(path))
    for name, value in (("BACKEND", "gke"), ("PROJECT", "p")):
        monkeypatch.setenv(f"KINETIC_{name}", value)
    client = client_of(Options(resolve("cpu")))
    assert (client.place.context, client.place.cluster, client.place.namespace) == ("one", "", "ml")
    config_file(tmp_path / "config", "one", "two", current="two")
    api = cluster.connect(client.place, {"KUBECONFIG": str(path)})
    assert (api.namespace, api._access.context) == ("ml", "one")  # type: ignore[attr-defined]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert client_of(Options(resolve("cpu"))).place == Place("gke", project="p")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(PreflightError, match=r"\(yaml\)\. Install them: pip install .*\[gcp\]"):
        cluster.connect(Place("gke"), {})
