"""The rights in the documentation are enough for a caller. If one is missing, the call is refused
before anything is sent."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from doubles.cluster.kinds import CSI_DRIVERS, DEVICE_CLASSES, QUOTAS
from doubles.cluster.roles import grants_of
from on_pods import wait_at_first

import kinetic
from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.resources import BY_KIND
from kinetic._backends.kubernetes.volumes import DEVICE_CLASS, MULTI_TIER_DRIVER
from kinetic.cli.root import call
from kinetic.errors import PreflightError, SetupFailed, UsageError

pytestmark = pytest.mark.double


def list_rights():
    return grants_of("Role") | grants_of("ClusterRole")


def four_answers():
    return 42


@pytest.fixture
def lacking(on_cluster):
    """A function that makes the caller a user who has all documented rights but the given ones."""

    def log_in(*without):
        rights = list_rights() - set(without)
        token = on_cluster.add_user("eve", lambda verb, noun, namespace: (verb, noun) in rights)
        on_cluster.write_kubeconfig(on_cluster.kubeconfig, token=token)

    return log_in


def test_the_documented_rights_are_enough(on_cluster, lacking):
    lacking()
    on_cluster.faults.reset(verb="create", resource="secrets", after=True)
    on_cluster.faults.reset(verb="create", resource="jobs", after=True)
    assert kinetic.run(accelerator="cpu")(abs)(-42) == 42
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_the_documented_roles_grant_what_is_used_and_nothing_else(on_cluster, monkeypatch):
    """Use every operation once. After each test, the fixture `on_cluster` checks that no other
    rights were used."""
    on_cluster.faults.reset(verb="create", resource="jobs", after=True)
    assert kinetic.run(accelerator="cpu")(abs)(-42) == 42
    on_cluster.faults.reset(verb="create", resource="jobsets", after=True)
    assert kinetic.run(accelerator="tpu-v6e-16")(four_answers)() == 42
    on_cluster.hold_back("kinetic-")
    waiting = kinetic.run(accelerator="tpu-v6e-16")(four_answers).run_async()
    on_cluster.wait_for(lambda: len(on_cluster.objects("pods")) == 4)
    waiting.kill_hosts(host=0)
    waiting.cancel()
    on_cluster.let_go("kinetic-")
    on_cluster.install_kueue({"lq": {"google.com/tpu": "32"}}).paused = True
    settings = {"QUEUE": "lq", "LOCAL_STORAGE": "multi-tier", "NETWORK_DEVICES": "all"}
    for name, value in (settings | {"POD_SIMULATED": "0"}).items():
        monkeypatch.setenv(f"KINETIC_{name}", value)
    on_cluster.store.create(CSI_DRIVERS, {"metadata": {"name": MULTI_TIER_DRIVER}})
    call(["doctor"])
    on_cluster.store.remove(CSI_DRIVERS, "", MULTI_TIER_DRIVER)
    monkeypatch.delenv("KINETIC_LOCAL_STORAGE")
    on_cluster.store.create(DEVICE_CLASSES, {"metadata": {"name": DEVICE_CLASS}})
    queued = kinetic.run(accelerator="tpu-v6e-16", slices=2)(four_answers).run_async()
    backend = queued._backend
    on_cluster.wait_for(lambda: "in the queue 'lq'" in (backend.why_waiting(queued.ref) or ""))
    backend._api.open_port("pod", 1).close()
    queued.cancel()
    on_cluster.store.remove(DEVICE_CLASSES, "", DEVICE_CLASS)
    assert on_cluster.used() == list_rights()


def test_a_secret_that_was_made_by_an_earlier_round_is_ours(on_cluster, lacking):
    lacking()
    on_cluster.faults.fail(503, times=5, verb="create", resource="secrets", after=True)
    assert kinetic.run(accelerator="cpu")(abs)(-42) == 42
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_a_missing_right_is_said_before_anything_is_sent(on_cluster, home):
    message = 'secrets is forbidden: User "eve" cannot create resource "secrets"'
    on_cluster.faults.fail(403, verb="try", resource="secrets", message=message)
    with pytest.raises(PreflightError, match=r"You \(eve\) may not create secrets"):
        kinetic.run(accelerator="cpu")(abs)(-42)
    assert kinetic.list_jobs() == []
    assert not on_cluster.left_over()


def test_a_job_whose_cancellation_was_refused_is_evicted_later_not_cancelled(on_cluster, home):
    marker = home.parent / "m"
    handle = kinetic.run(accelerator="cpu", retries=1)(wait_at_first).run_async(str(marker))
    on_cluster.wait_for(lambda: Path(f"{marker}-0").exists())
    message = 'jobs.batch "j" is forbidden: User "eve" cannot delete resource "jobs"'
    on_cluster.faults.fail(403, verb="delete", resource="jobs", message=message)
    with pytest.raises(PreflightError, match="may not delete jobs"):
        handle.cancel()
    (pod,) = on_cluster.objects("pods")
    on_cluster.evict_pod(pod["metadata"]["name"])
    assert handle.result(timeout=60) == "again"


def test_a_queue_without_kueue_is_refused_before_anything_is_sent(on_cluster, monkeypatch):
    monkeypatch.setenv("KINETIC_QUEUE", "team-a")
    for accelerator in ("cpu", "tpu-v6e-16"):
        with pytest.raises(PreflightError, match="has no Kueue, so the job would start at once"):
            kinetic.run(accelerator=accelerator)(abs)(-42)
    assert kinetic.list_jobs() == []
    assert not on_cluster.left_over()


def test_a_quota_of_jobs_that_is_smaller_than_the_job_ends_it_at_once(on_cluster):
    on_cluster.add_quota("few", {"count/jobs.batch": "1"})
    message = "quota 'few' .*too small for the job.*each of its 2 Jobs needs count/jobs.batch=1"
    with pytest.raises(SetupFailed, match=message):
        kinetic.run(accelerator="cpu", slices=2)(abs)(-42)
    on_cluster.store.remove(QUOTAS, on_cluster.namespace, "few")


@pytest.mark.cluster(service_accounts=["default"])
def test_a_missing_service_account_is_said_before_anything_is_sent(on_cluster):
    with pytest.raises(PreflightError, match="service account 'kinetic' does not exist"):
        kinetic.run(accelerator="cpu")(abs)(-42)
    assert kinetic.list_jobs() == []
    assert not on_cluster.left_over()


def test_jobs_one_by_one_ask_once(on_cluster):
    double = kinetic.run(accelerator="cpu")(abs)
    handles = [double.run_async(-number) for number in range(5)]
    assert [handle.result() for handle in handles] == list(range(5))
    counts = on_cluster.counts()
    assert counts["create jobs"] == counts["create secrets"] == 5
    assert counts["try jobs"] == counts["try secrets"] == counts["get serviceaccounts"] == 1
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_a_secret_that_no_program_could_be_started_with_is_refused(on_cluster, monkeypatch):
    monkeypatch.setenv("MODEL_KEY", "k" * 131_072)
    call = kinetic.run(accelerator="cpu", secrets=["MODEL_KEY"])(abs)
    with pytest.raises(UsageError, match="The secret MODEL_KEY has 131,083 bytes"):
        call(-3)
    assert not on_cluster.left_over()
    monkeypatch.setenv("MODEL_KEY", "k" * (131_072 - len("MODEL_KEY=") - 1))
    assert call(-3) == 3


@pytest.mark.long
@pytest.mark.cluster(namespaces=["ml"])
def test_the_page_can_be_followed_by_whom_its_roles_were_given(
    on_cluster, monkeypatch, tmp_path, capsys
):
    """Run the commands of docs/how-to/kubernetes.md as a user with the roles on that page."""
    monkeypatch.delenv("KINETIC_CLUSTER")
    monkeypatch.chdir(tmp_path)
    program = (
        "import os, time\nprint('host', os.environ['KINETIC_HOST_INDEX'])\n"
        f"while not os.path.exists({str(tmp_path / 'enough')!r}): time.sleep(0.05)\n"
    )
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "pyproject.toml").touch()

    def type_line(line, code=0):
        actual = call(line.split())
        assert code in (None, actual), capsys.readouterr()
        return capsys.readouterr()

    type_line("profile create tpus --cluster fake --namespace ml")
    type_line("profile use tpus")
    checks = json.loads(type_line("doctor --json", code=None).out)["findings"]
    of_cluster = [c for c in checks if c["check"] in ("cluster", "JobSet", "rights", "node pools")]
    assert {check["level"] for check in of_cluster} == {"ok"}
    assert "tpu-v6e-16" in type_line("accelerators --live").out
    documents = json.loads(type_line("run -a tpu-v6e-16 --dry-run -o json train.py").out)
    variables = {"KUBECONFIG": str(on_cluster.kubeconfig)}
    with contextlib.closing(HttpApi(kubeconfig.find(variables), variables)) as api:
        for document in documents["items"]:
            kind = BY_KIND[document["apiVersion"], document["kind"]]
            api.create(kind, document, dry_run=True)
    job_id = type_line("run -a tpu-v6e-16 --detach train.py").out.strip()
    handle = kinetic.attach(job_id)
    on_cluster.wait_for(lambda: handle.status() == "RUNNING")
    assert "RUNNING" in type_line("jobs list").out
    type_line(f"jobs status {job_id}")
    type_line(f"jobs kill --yes {job_id} --host 2")
    assert type_line(f"jobs wait {job_id}", code=1).err
    assert "host 2" in type_line(f"jobs status {job_id}").out
    waiting = type_line("run -a tpu-v6e-16 --detach train.py").out.strip()
    type_line(f"jobs cancel {waiting}")
    for job in (job_id, waiting):
        type_line(f"jobs cleanup --yes {job}")
