"""Clusters and users from kubeconfig files, which are never written."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinetic._backends.kubernetes import cluster, credentials, kubeconfig
from kinetic._backends.kubernetes.credentials import log_in
from kinetic._backends.kubernetes.kubeconfig import Access, choose, find, read
from kinetic._client.planning import target_of
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
        ("", "", "has no current context"),
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
    assert log_in(access, {}) == {"token": "t1"}  # the first user of that name
    assert [p.read_bytes() for p in (first, second)] == before
    assert "t1" not in repr(access)


def test_of_several_files_the_first_current_context_counts(tmp_path: Path) -> None:
    first = config_file(tmp_path / "a", "one", current="one")
    second = config_file(tmp_path / "b", "two", current="two")
    assert find({"KUBECONFIG": f"{first}{os.pathsep}{second}"}).context == "one"


@pytest.mark.parametrize(
    ("project", "zone", "words"),
    [
        ("p", "us-east5-b", ""),
        ("p", "", ""),
        ("q", "", "gke_p_us-east5-b_tpu, belongs to the project 'p', but the job's project is 'q'"),
        ("p", "us-west1-a", "belongs to the zone 'us-east5-b', but the job's zone is 'us-west1-a'"),
    ],
)
def test_a_current_context_of_another_project_is_refused(
    tmp_path: Path, project: str, zone: str, words: str
) -> None:
    config = read([config_file(tmp_path / "config", *NAMES, current=NAMES[0])])
    if not words:
        assert choose(config, project=project, zone=zone) == NAMES[0]
        return
    with pytest.raises(PreflightError, match=words):
        choose(config, project=project, zone=zone)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    with pytest.raises(PreflightError, match="No kubeconfig was found") as caught:
        find({"KUBECONFIG": str(path)}, cluster="tpus")
    assert str(path) in str(caught.value)
    assert "get-credentials tpus" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [\n\n", 'cannot be read: "ParserError: while parsing a flow node expected'),
        ("- 1", "cannot be read"),
        ("", "No kubeconfig was found"),
        ("# empty", "file is empty"),
        ("contexts: abc", "cannot be read"),
        ("contexts: 5", "cannot be read"),
        ("users: {name: me}", "cannot be read"),
        ("clusters: [one]", "cannot be read"),
        ("clusters: [{name: one, cluster: two}]", "cannot be read"),
        ("{current-context: [one], contexts: [{name: two}]}", "does not exist"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(PreflightError) as caught:
        find({"KUBECONFIG": str(path)})
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.starts_processes
def test_relative_paths_stay_good_when_the_program_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file(tmp_path / "config", "one", current="one", exec={"command": "./login"})
    plugin(tmp_path / "login", f"printf '%s' '{credential('abc')}'")
    monkeypatch.chdir(tmp_path)
    access = find({"KUBECONFIG": f"none{os.pathsep}config"})
    monkeypatch.chdir("/")
    assert log_in(access, {"PATH": os.defpath}) == {"token": "abc"}
    assert kubeconfig.reread(access) == access


def test_who_has_no_home_has_no_kubeconfig() -> None:
    assert kubeconfig.paths_of({"HOME": "~nobody-of-this-name"})


def test_a_pod_uses_its_own_account(tmp_path: Path) -> None:
    for name, text in (("token", "secret\n"), ("ca.crt", "CA"), ("namespace", "ml\n")):
        (tmp_path / name).write_text(text)
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    access = kubeconfig.in_cluster(variables, tmp_path)
    assert access is not None
    assert (access.server, access.namespace) == ("https://10.0.0.1:443", "ml")
    assert access.cluster == {"certificate-authority": str(tmp_path / "ca.crt")}
    assert kubeconfig.in_cluster({}, tmp_path) is None
    assert log_in(access, {}) == {"token": "secret"}
    (tmp_path / "token").write_text("newer")
    assert log_in(kubeconfig.reread(access), {}) == {"token": "newer"}


def plugin(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def access_with(command: str, **more: Any) -> Access:
    entry = {"command": command, "apiVersion": "client.authentication.k8s.io/v1", **more}
    return Access("https://x", context="one", user={"exec": entry})


def credential(token: str) -> str:
    return json.dumps({"kind": "ExecCredential", "status": {"token": token}})


@pytest.mark.starts_processes
def test_a_plugin_logs_in(tmp_path: Path) -> None:
    request_file = tmp_path / "seen"
    command = plugin(
        tmp_path / "login",
        f'echo "$KUBERNETES_EXEC_INFO" > {request_file}; test "$EXTRA" = yes || exit 1\n'
        f"printf '%s' '{credential('abc')}'",
    )
    access = access_with(command, env=[{"name": "EXTRA", "value": "yes"}], interactiveMode="Never")
    assert log_in(access, {"PATH": os.defpath}) == {"token": "abc"}
    request = json.loads(request_file.read_text())
    assert (request["kind"], request["spec"]) == ("ExecCredential", {"interactive": False})


@pytest.mark.starts_processes
def test_a_plugin_may_bring_a_certificate(tmp_path: Path) -> None:
    pair = {"clientCertificateData": "CERT", "clientKeyData": "KEY"}
    command = plugin(tmp_path / "login", f"printf '%s' '{json.dumps({'status': pair})}'")
    assert log_in(access_with(command), {"PATH": os.defpath}) == {
        "client-certificate-data": base64.b64encode(b"CERT").decode(),
        "client-key-data": base64.b64encode(b"KEY").decode(),
    }


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo please log in >&2; exit 3", "failed with exit code 3: please log in"),
        ("echo hello", "did not print the login data"),
        ("echo '{\"status\": {}}'", "no token and no certificate"),
        ('echo \'{"status": {"clientCertificateData": "c"}}\'', "no token and no certificate"),
    ],
)
def test_a_plugin_that_fails_says_why(tmp_path: Path, script: str, words: str) -> None:
    access = access_with(plugin(tmp_path / "login", script))
    with pytest.raises(PreflightError) as caught:
        log_in(access, {"PATH": os.defpath})
    assert words in str(caught.value)


@pytest.mark.starts_processes
def test_a_plugin_that_never_ends_is_given_up_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plugin(tmp_path / "login", f"echo $$ > {tmp_path / 'pid'}; exec sleep 1000")
    monkeypatch.setattr(credentials, "PLUGIN_S", 0.5)
    with pytest.raises(
        PreflightError, match=r"login failed: the program did not end within 0\.5 s"
    ):
        log_in(access_with(path), {"PATH": os.defpath})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("key", credentials.IMPERSONATION_KEYS)
def test_a_user_that_acts_for_somebody_else_is_refused(key: str) -> None:
    access = Access("https://x", context="one", user={"token": "t", key: "robot"})
    with pytest.raises(
        PreflightError, match=rf"context 'one' impersonates another user \(key '{key}'\)"
    ):
        log_in(access, {})


@pytest.mark.starts_processes
def test_a_plugin_that_must_ask_its_user_needs_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = plugin(tmp_path / "login", f"printf '%s' '{credential('abc')}'")
    variables = {"PATH": os.defpath}
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PreflightError, match="must ask for input"):
        log_in(access_with(command, interactiveMode="Always"), variables)
    user = log_in(access_with(command, interactiveMode="IfAvailable"), variables)
    assert user == {"token": "abc"}


def test_a_plugin_that_is_not_installed_comes_with_its_hint() -> None:
    access = access_with("no-such-login", installHint="Install it with x.")
    with pytest.raises(PreflightError, match=r"not installed\. Install it with x\."):
        log_in(access, {"PATH": "/nowhere"})


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "user",
    [
        {"exec": "login"},
        {"tokenFile": 5},
        {"token": "two\nlines"},
        {"token": "a\u20ac"},
        {"exec": {"command": "/bin/sh", "args": 5}},
        {"exec": {"command": "/bin/sh", "env": "abc"}},
        {"exec": {"command": "/bin/sh", "env": [{"name": "A", "value": "\0"}]}},
        {"exec": {"command": "/bin/echo", "args": [credential("two\nlines")]}},
    ],
)
def test_a_user_that_is_malformed_is_named(user: Any) -> None:
    access = Access("https://x", context="one", user=user)
    with pytest.raises(PreflightError, match=r"kubeconfig"):
        log_in(access, {"PATH": os.defpath})


def test_tokens_come_without_the_end_of_their_line() -> None:
    access = Access("https://x", user={"token": "abc\n"})
    assert log_in(access, {}) == {"token": "abc"}


def test_other_ways_to_log_in() -> None:
    def of(**user: Any) -> dict[str, Any]:
        return log_in(Access("https://x", user=user), {})

    assert of() == {}
    assert of(username="me", password="pw") == {"username": "me", "password": "pw"}
    with pytest.raises(PreflightError, match="cannot be read"):
        of(tokenFile="/no/such/file")
    oidc = {"name": "oidc", "config": {"id-token": "abc\n", "refresh-token": "r"}}
    assert of(**{"auth-provider": oidc}) == {"token": "abc"}, "only kubectl refreshes it"
    with pytest.raises(PreflightError, match="auth-provider 'azure', which is no longer"):
        of(**{"auth-provider": {"name": "azure"}})


def test_a_job_stays_where_its_submission_found_the_current_context(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectx` and `kubens` affect only later jobs. A job that was read in another namespace would
    seem to have been removed."""
    path = config_file(tmp_path / "config", "one", "two", current="one")
    monkeypatch.setenv("KUBECONFIG", str(path))
    for name, value in (("BACKEND", "gke"), ("PROJECT", "p")):
        monkeypatch.setenv(f"KINETIC_{name}", value)
    target = target_of(Options(resolve("cpu")))
    assert (target.place.context, target.place.cluster, target.place.namespace) == ("one", "", "ml")
    config_file(tmp_path / "config", "one", "two", current="two")
    api = cluster.connect(target.place, {"KUBECONFIG": str(path)})
    assert (api.namespace, api._access.context) == ("ml", "one")  # type: ignore[attr-defined]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert target_of(Options(resolve("cpu"))).place == Place("gke", project="p")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(
        PreflightError, match=r"not installed: kubernetes\. Install them: pip install .*\[gcp\]"
    ):
        cluster.connect(Place("gke"), {})
