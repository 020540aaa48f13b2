"""`kinetic up`, `down`, `status`, `pool` and `init` against a double of Google Cloud: the whole
way, interruptions after every step, and what can be in the way."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.container_v1")
pytest.importorskip("kubernetes_validate")

from doubles.google_cloud import GoogleDouble, Killed, Refusal, serving

from kinetic._backends.kubernetes import google_calls
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._client.doctor.examination import Report
from kinetic._clusters import access, cloud, control_plane, convergence, gke
from kinetic._clusters.difference import Action, Step
from kinetic._clusters.releases import RELEASES
from kinetic._clusters.wanted import Wanted
from kinetic.cli.root import call
from kinetic.errors import PreflightError, StoreError, SubmitError

MANIFESTS = Path(__file__).parents[1] / "doubles" / "google_cloud"
INSTALLED = [f"--{name}-manifest={MANIFESTS / f'{name}.yaml'}" for name in ("jobset", "kueue")]
UP = ["up", "--project=my-project", "--cluster=dev", "-y", *INSTALLED]
STANDARD = [*UP, "--zone=us-east5-b", "--standard", "--accelerator=tpu-v6e-16"]
PROGRAM = Path(__file__).with_name("on_clusters.py")
LIMIT_S = 280


@pytest.fixture
def google(tmp_path, monkeypatch):
    """A project in which nothing is enabled. After the test, nothing may have been sent that
    Google would not understand."""
    with serving(tmp_path) as double:
        for name, value in double.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without Google's login program
        monkeypatch.setenv("KINETIC_PROFILES_FILE", str(tmp_path / "own" / "profiles.json"))
        for module in (cloud, control_plane, gke):
            monkeypatch.setattr(module, "POLL_S", 0.0)
        monkeypatch.setattr("kinetic._client.doctor.examination.examine", lambda: Report(()))
        yield double
        assert double.problems == []
        assert [kube.problems for kube in double.kubes.values() if kube.problems] == []


def state_of(google: GoogleDouble) -> str:
    """Return all that was made, without times and versions."""
    kubes = {
        name: {"/".join(key): document for key, document in sorted(kube.objects.items())}
        for name, kube in google.kubes.items()
    }
    clusters = {
        name: {k: v for k, v in cluster.items() if k not in ("endpoint", "masterAuth")}
        for name, cluster in google.clusters.items()
    }
    policies = {n: p["bindings"] for n, p in google.policies.items()}
    state = [sorted(google.services), google.buckets, policies, clusters, kubes]
    return json.dumps(state, sort_keys=True)


def test_from_an_empty_project_to_a_cluster_and_back(google, capsys, tmp_path):
    """A newcomer types four commands: the cluster is there, described, used and gone; the second
    `up` changes nothing; the bucket is removed only by its name."""
    assert call([*UP, "--accelerator=tpu-v6e-16"]) == 0
    printed = capsys.readouterr().out
    assert "create cluster dev: Autopilot in us-central1" in printed
    assert "The current profile is dev" in printed
    changes = list(google.changes)
    assert len(changes) == len(set(changes))
    assert google.kubes["dev"].names("rolebindings") == ["kinetic:ann@example.com"]
    profile = json.loads((tmp_path / "own" / "profiles.json").read_text())["profiles"]["dev"]
    assert profile["store"] == "gs://my-project-kn-dev-store"
    access = json.loads((tmp_path / "own" / "clusters.kubeconfig").read_text())
    assert [context["name"] for context in access["contexts"]] == ["gke_my-project_us-central1_dev"]

    assert call([*UP, "--accelerator=tpu-v6e-16"]) == 0
    assert "Nothing is missing." in capsys.readouterr().out
    assert google.changes == changes

    assert call(["status", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["mode"], state["status"], state["usd_per_hour"]) == ("Autopilot", "RUNNING", 0.1)
    assert [queue["name"] for queue in state["queues"]] == ["kinetic"]

    google.contents["my-project-kn-dev-store"] = ["jobs/a", "jobs/b", "blobs/c"]
    assert call(["down", "-y"]) == 0
    assert "my-project-kn-dev-store stays, with all records" in capsys.readouterr().out
    assert (google.clusters, len(google.buckets)) == ({}, 1)
    assert json.loads((tmp_path / "own" / "clusters.kubeconfig").read_text())["contexts"] == []
    assert call(["down", "-y", "--delete-store", "another"]) == 2
    assert call(["down", "-y", "--delete-store", "my-project-kn-dev-store"]) == 0
    assert google.buckets == {}
    assert google.contents["my-project-kn-dev-store"] == []


def test_apis_that_were_enabled_just_now_are_waited_for(google, monkeypatch):
    """In an empty project GKE still refuses for a while after it was enabled: `up` asks again."""
    monkeypatch.setattr(cloud, "ENABLE_PAUSE_S", 0.0)
    google.lag = 3
    assert call([*UP, "--accelerator=cpu"]) == 0
    assert google.changes[0] == "enable"


def test_preview_changes_nothing(google, capsys):
    """With --preview or --dry-run steps and price are shown, and nothing is sent that changes
    something; without a terminal and -y neither."""
    words = [word for word in STANDARD if word != "-y"]
    assert call([*words, "--preview"]) == 0
    assert call([*words, "--dry-run"]) == 0
    assert "$43.20 an hour while a job runs" in capsys.readouterr().out
    assert call(words) == 2
    assert "Add --yes to confirm" in capsys.readouterr().err
    assert google.changes == []


def test_node_pools_of_a_standard_cluster(google, capsys):
    """Pools are added, listed with their price, and removed; the queue grows with them."""
    assert call(STANDARD) == 0
    assert call(["pool", "add", "--accelerator=v6e-8", "--slices=2", "--spot", "-y"]) == 0
    assert "pool tpu-v6e-8-spot-1" in google.changes
    flavors = google.kubes["dev"].names("resourceflavors")
    assert flavors == ["cpu", "tpu-v6e-16", "tpu-v6e-8-spot"]
    capsys.readouterr()
    assert call(["pool", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["tpu-v6e-8-spot-0"]["capacity"] == "spot"
    assert rows["tpu-v6e-16-0"]["most"] == 4
    assert call(["pool", "remove", "tpu-v6e-8-spot-1", "--preview"]) == 0
    assert call(["pool", "remove", "tpu-v6e-8-spot-1", "-y"]) == 0
    names = [pool["name"] for pool in google.clusters["dev"]["nodePools"]]
    assert names == ["default-pool", "tpu-v6e-16-0", "tpu-v6e-8-spot-0"]
    assert call(["pool", "remove", "mine", "-y"]) == 4
    assert "no node pool mine" in capsys.readouterr().err


def test_autopilot_needs_no_pools(google, capsys):
    """`pool add` on Autopilot says that pools come by themselves; `pool list` shows its nodes."""
    assert call([*UP, "--accelerator=tpu-v6e-16"]) == 0
    labels = {
        "cloud.google.com/gke-nodepool": "nap-1",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "node.kubernetes.io/instance-type": "ct6e-standard-4t",
    }
    for number in range(4):
        node = {"kind": "Node", "metadata": {"name": f"n{number}", "labels": labels}}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        status = ready | {"allocatable": {"google.com/tpu": "4"}}
        google.kubes["dev"].put("v1", "nodes", "", node | {"status": status})
    assert call(["pool", "add", "--accelerator=l4", "-y"]) == 2
    assert "come with the jobs that need them" in capsys.readouterr().err
    assert call(["pool", "list"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["nap-1", "tpu-v6e-16", "on", "demand", "4", "RUNNING", "$43.20"]
    google.quotas["compute.googleapis.com/tpus_per_tpu_family"] = [
        {"effectiveLimit": "64", "dimensions": {"region": "us-central1", "tpu_family": "CT6E"}}
    ]
    assert call(["status"]) == 0
    printed = capsys.readouterr().out
    assert "v6e: 16 of 64" in printed
    assert "$43.30 an hour" in printed


def test_down_finds_the_cluster_or_says_where_it_is(google, capsys):
    """Autopilot clusters lie in the region of the zone that was named: `down` with that zone
    removes it. With another zone it does not say that there is nothing to remove."""
    up = [*UP, "--accelerator=cpu", "--zone=us-east5-a"]
    assert call(up) == 0
    assert call(["down", "-y", "--zone=us-east1-d"]) == 2
    assert "no cluster dev in us-east1-d, but in us-east5. Correct" in capsys.readouterr().err
    assert call([*up, "--zone=us-central1-a"]) == 2
    assert "both would share a bucket" in capsys.readouterr().err
    words = ["down", "-y", "--zone=us-east5-a", "--cluster=gke_my-project_us-east5_dev"]
    capsys.readouterr()
    assert call([*words, "--preview"]) == 0
    assert "remove cluster dev" in capsys.readouterr().out
    assert "dev" in google.clusters
    assert call(words) == 0
    assert google.clusters == {}
    assert call(["down", "-y", "--zone=us-east5-a"]) == 0
    captured = capsys.readouterr()
    assert "nothing to remove: my-project has no cluster dev" in captured.err
    assert "missing" not in captured.out


def test_what_loses_its_label_during_the_question_stays(google, capsys, monkeypatch):
    """While `down` and `pool remove` ask, somebody replaces the cluster and the pool by their own:
    what is there is asked again after the answer, and both stay."""
    assert call(STANDARD) == 0
    pool = google.clusters["dev"]["nodePools"][-1]
    before = list(google.changes)
    monkeypatch.setattr(
        "kinetic.cli.commands.clusters._confirm", lambda *_, **__: pool["config"].clear()
    )
    assert call(["pool", "remove", "tpu-v6e-16-0"]) == 4
    monkeypatch.setattr(
        "kinetic.cli.commands.clusters._confirm",
        lambda *_, **__: google.clusters["dev"].pop("resourceLabels"),
    )
    assert call(["down"]) == 0
    assert google.changes == before


def test_a_cluster_without_an_address_is_named(google, capsys):
    """The cluster is being created: `status` says its state."""
    assert call([*UP, "--accelerator=cpu"]) == 0
    google.clusters["dev"] |= {"status": "PROVISIONING"}
    del google.clusters["dev"]["endpoint"]
    assert call(["status"]) == 4
    assert "no address now; its state is PROVISIONING" in capsys.readouterr().err


def test_down_refuses_while_jobs_run(google, capsys):
    """A job has not ended: `down` lists it and removes nothing, unless --force is given."""
    assert call([*UP, "--accelerator=cpu"]) == 0
    for name, condition in (("a", "Complete"), ("b", "Suspended")):
        labels = {"kinetic.dev/job-id": f"job-{name}"}
        job = {"kind": "Job", "metadata": {"name": name, "labels": labels}}
        status = {"conditions": [{"type": condition, "status": "True"}]}
        google.kubes["dev"].put("batch/v1", "jobs", "default", job | {"status": status})
    assert call(["down", "-y"]) == 4
    assert "have not ended: job-b." in capsys.readouterr().err
    assert "dev" in google.clusters
    labels = google.clusters["dev"].pop("resourceLabels")
    assert call(["down", "-y", "--delete-store=my-project-kn-dev-store"]) == 4
    assert "have not ended: job-b." in capsys.readouterr().err
    google.clusters["dev"]["resourceLabels"] = labels
    assert call(["down", "-y", "--force"]) == 0
    assert google.clusters == {}


def test_an_operation_that_fails_late_is_tried_again(google, capsys):
    """GKE accepts the node pool, works on it, and reports a stockout: one sentence says what helps,
    and the same command removes what is left of it and creates it again."""
    google.failing["tpu-v6e-16-0"] = "GCE_STOCKOUT: us-east5-b does not have enough resources"
    assert call(STANDARD) == 6
    error = capsys.readouterr().err
    assert "no machines are free" in error
    assert "--flex-start" in error
    assert call(STANDARD) == 0
    assert google.changes.count("pool tpu-v6e-16-0") == 2
    assert google.changes.count("remove pool tpu-v6e-16-0") == 1
    assert google.clusters["dev"]["nodePools"][-1]["status"] == "RUNNING"


def test_a_cluster_that_fails_is_removed_by_down(google, capsys):
    """GKE gives up the cluster itself: `up` says so and changes nothing, `down` removes it."""
    google.failing["dev"] = "All cluster resources were brought up, but the master is unhealthy"
    assert call([*UP, "--accelerator=cpu"]) == 4
    assert call([*UP, "--accelerator=cpu"]) == 4
    assert "GKE failed to create the cluster dev" in capsys.readouterr().err
    assert call(["down", "-y", "--project=my-project", "--cluster=dev"]) == 0
    assert call([*UP, "--accelerator=cpu"]) == 0


def test_something_of_that_name_that_is_not_ours_is_left_alone(google, capsys):
    """A cluster that gcloud has made has the name: `up` refuses, `down` says that it stays."""
    assert call([*UP, "--accelerator=cpu"]) == 0
    del google.clusters["dev"]["resourceLabels"]
    before = list(google.changes)
    assert call([*UP, "--accelerator=cpu"]) == 4
    assert "kinetic did not create" in capsys.readouterr().err
    assert call(["down", "-y"]) == 0
    captured = capsys.readouterr()
    assert "The cluster dev stays" in captured.out
    assert "nothing to remove" in captured.err
    assert google.changes == before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["up", "-y", "--accelerator=cpu"], 2, "No project is named"),
        (["up", "--project=other", "--accelerator=cpu"], 4, "gcloud projects list"),
        (["up", "--project=my-project", "--zone=us-east1-b", "--accelerator=v6e-8"], 4, "Zones"),
        (["status", "--project=my-project"], 4, "`kinetic up` enables"),
        (["up", "--project=My Project?", "--accelerator=cpu"], 2, "is not the id of a project"),
        (["up", "--project=my-project", "--gcsfuse=data"], 2, "Add --ray"),
        (["up", "--accelerator=v6e-9"], 2, "There is no accelerator 'v6e-9'"),
        (["init"], 2, "`kinetic up --project ID` creates a cluster"),
    ],
)
def test_bad_input_is_one_sentence(google, capsys, words, code, message):
    """A wrong project, zone or command: the reason and what helps; nothing is changed."""
    assert call(words) == code
    assert message in capsys.readouterr().err
    assert google.changes == []


def test_without_credentials_the_login_is_named(google, capsys, monkeypatch):
    """No application default credentials: the command that makes them is named."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent.json")
    assert call([*UP, "--accelerator=cpu"]) == 4
    assert "gcloud auth application-default login" in capsys.readouterr().err


def test_a_quota_of_nothing_is_said_before_anything_is_made(google, capsys):
    """The region allows no chip of the family: the page for more is named."""
    google.services.add("compute.googleapis.com")
    google.quotas["compute.googleapis.com/tpus_per_tpu_family"] = [
        {"effectiveLimit": "0", "dimensions": {"tpu_family": "CT6E"}}
    ]
    assert call(STANDARD) == 4
    assert "is 0, and tpu-v6e-16 needs 16. Ask for more at https" in capsys.readouterr().err
    assert google.changes == []


def test_a_right_that_is_missing_is_named(google, capsys):
    """The caller may not create clusters: Google's words and the roles to ask for."""
    google.refusals["container.projects.locations.clusters.create"] = Refusal(
        403, "PERMISSION_DENIED", 'Required "container.clusters.create" permission.'
    )
    assert call([*UP, "--accelerator=cpu"]) == 4
    error = capsys.readouterr().err
    assert 'project my-project: "Required "container.clusters.create"' in error
    assert "roles/container.admin" in error


def test_a_manifest_that_is_not_the_released_one_is_refused(google, capsys, monkeypatch):
    """The file at the pinned URL has changed: its digest is shown, and nothing of it is applied."""
    monkeypatch.setattr(cloud, "download", lambda _url: b"kind: Evil")
    assert call([*UP[:-1], "--accelerator=cpu", "--jobset-manifest="]) == 4
    assert "JobSet 0.12.0 is not the released one: its SHA-256" in capsys.readouterr().err
    assert "jobset-system" not in google.kubes["dev"].names("namespaces")


def test_without_the_extra_one_line_says_how_to_install_it(google, capsys, monkeypatch):
    """Kubernetes' client is missing: each of the seven commands says what to install."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    add = ["pool", "add", "--accelerator=v6e-8"]
    for words in (
        UP,
        ["down"],
        ["status"],
        ["init"],
        add,
        ["pool", "remove", "a"],
        ["pool", "list"],
    ):
        assert call(words) == 4
        error = capsys.readouterr().err
        assert "Install them: " in error
        assert len(error.splitlines()) == 1


def test_other_commands_do_not_load_google(google):
    """`import kinetic` and commands about jobs load neither this package nor Google's."""
    script = (
        "import sys, kinetic\n"
        "from kinetic.cli.root import call\n"
        "call(['jobs', 'list'])\n"
        "print([m for m in sys.modules if m.startswith(('google', 'kinetic._clusters'))])"
    )
    run = [sys.executable, "-c", script]
    printed = subprocess.run(run, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert printed.stdout.splitlines()[-1] == "[]"


def test_a_ray_cluster_is_only_printed(google, capsys):
    """`up --ray` asks and applies nothing: the manifest goes to stdout, the two commands to
    stderr."""
    assert call(["up", "--ray", "--accelerator=tpu-v6e-16", "--slices=2"]) == 0
    captured = capsys.readouterr()
    assert "kind: RayCluster" in captured.out
    assert "kubectl apply --server-side -f ray.yaml" in captured.err
    assert google.changes == []


def test_without_docker_the_sentence(google, capsys, monkeypatch, tmp_path):
    """`up --kind` on a machine without Docker, then without kind."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call(["up", "--kind", "--accelerator=v6e-16"]) == 4
    assert "needs Docker, which is not installed" in capsys.readouterr().err
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    assert call(["up", "--kind", "--accelerator=v6e-16"]) == 4
    assert "needs kind, which is not installed" in capsys.readouterr().err


def test_a_cluster_that_does_not_exist_or_exists_twice(google, capsys):
    """The name fits no cluster, or two of different zones; a profile is of another cluster."""
    google.services |= {"container.googleapis.com", "storage.googleapis.com"}
    place = ["--project=my-project", "--cluster=dev"]
    assert call(["pool", "list", *place]) == 3
    assert "has no cluster dev. Create it with `kinetic up`" in capsys.readouterr().err
    for zone in ("us-east5-a", "us-east5-b"):
        google.clusters[zone] = {"name": "dev", "location": zone}
    assert call(["status", *place]) == 2
    assert "has several clusters dev, in us-east5-a, us-east5-b." in capsys.readouterr().err
    google.clusters.clear()
    assert call([*UP, "--accelerator=cpu"]) == 0
    assert call([*UP, "--cluster=prod", "--profile-name=dev", "--accelerator=cpu"]) == 2
    assert (
        "The profile 'dev' exists already, for the cluster dev of the project"
        in capsys.readouterr().err
    )
    assert call(["pool", "add", "--accelerator=cpu"]) == 2
    assert call(["up", "--ray"]) == 2
    assert "for example --accelerator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("kind: Evil", "is not a list of Kubernetes objects: KeyError"),
        ("{apiVersion: v1, kind: Pod, metadata: {name: a}}", "is not that of JobSet"),
    ],
)
def test_a_manifest_of_the_user_must_be_one(tmp_path, text, message):
    """The named file is missing, or something else: said before any of it is applied."""
    path = tmp_path / "jobset.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PreflightError, match=message):
        cloud.read_manifest(RELEASES["jobset"].replace_source(str(path)))


def test_a_controller_that_does_not_start_is_named(google, capsys, monkeypatch):
    """JobSet is installed, but its pods get no machine: the command that says why is named."""
    monkeypatch.setattr(control_plane, "LONGEST_S", -1.0)
    assert call([*UP, "--accelerator=cpu"]) == 4
    assert "`kubectl -n jobset-system describe pods` says why" in capsys.readouterr().err


def test_gke_that_takes_too_long_or_does_not_answer(google, capsys, monkeypatch):
    """An operation that does not end, and a service that cannot be reached: try again."""
    monkeypatch.setattr(gke, "LONGEST_S", -1.0)
    assert call([*UP, "--accelerator=cpu"]) == 6
    assert "GKE has not finished within an hour" in capsys.readouterr().err
    monkeypatch.setattr(google_calls, "TRIES", 1)
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER", "http://127.0.0.1:1")
    assert call(["status", "--project=my-project"]) == 6
    assert "127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_a_cluster_that_something_else_changes_all_the_time(google, capsys, monkeypatch):
    """Whatever is made is gone in the next round: `up` ends, and says so."""
    step = Step(Action.GRANT, "again", body={"role": "r", "member": "user:ann"})
    assert call([*UP, "--accelerator=cpu"]) == 0
    monkeypatch.setattr(convergence, "difference", lambda *_: [step])
    doors = convergence.open_doors("my-project", os.environ)
    wanted = Wanted("dev", "my-project", "us-central1", bucket="my-project-kn-dev-store")
    with pytest.raises(SubmitError, match="not complete after 12 attempts"):
        convergence.converge(wanted, doors, print)


def test_the_file_of_accesses_is_damaged_or_cannot_be_written(tmp_path):
    """The kubeconfig beside the profiles is no YAML, or its folder is a file."""
    entry = Access("https://127.0.0.1:1", "kind-a")
    (tmp_path / "clusters.kubeconfig").write_text("{")
    named = {"KINETIC_PROFILES_FILE": str(tmp_path / "profiles.json")}
    with pytest.raises(PreflightError, match=r"cannot be read: .*Remove it"):
        access.write(entry, named)
    below = {"KINETIC_PROFILES_FILE": str(tmp_path / "clusters.kubeconfig" / "profiles.json")}
    with pytest.raises(StoreError, match="cannot be written"):
        access.write(entry, below)


# --- on a terminal, and on a laptop


class Terminal(io.StringIO):
    """A terminal at which somebody has typed."""

    def isatty(self) -> bool:
        return True


def type_in(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


def test_init_creates_and_joins(google, capsys, monkeypatch, tmp_path):
    """`kinetic init` asks for what `up` needs, shows the same preview, and creates; on another
    machine it lists the cluster and joins it."""
    google.machines.add("ct6e-standard-4t")
    monkeypatch.setattr(cloud, "download", lambda url: (MANIFESTS / name_of(url)).read_bytes())
    monkeypatch.setattr(
        "kinetic._clusters.releases.RELEASES",
        {key: replace(release, sha256="") for key, release in RELEASES.items()},
    )
    google.services.add("container.googleapis.com")
    type_in(monkeypatch, "join", "my-project")
    assert call(["init"]) == 3
    google.services.clear()
    type_in(monkeypatch, "create", "my-project", "tpu-v6e-16", "y")
    assert call(["init", "--cluster=dev"]) == 0
    captured = capsys.readouterr()
    assert "create cluster dev: Autopilot" in captured.out
    assert google.kubes["dev"].names("clusterqueues") == ["kinetic"]
    monkeypatch.setenv("KINETIC_PROFILES_FILE", str(tmp_path / "other" / "profiles.json"))
    type_in(monkeypatch, "join", "my-project", "1")
    assert call(["init"]) == 0
    assert "1. dev in us-central1, RUNNING" in capsys.readouterr().out
    profile = json.loads((tmp_path / "other" / "profiles.json").read_text())["profiles"]["dev"]
    assert profile["store"] == "gs://my-project-kn-dev-store"


def name_of(url: str) -> str:
    return "jobset.yaml" if "jobset" in url else "kueue.yaml"


def test_down_asks_for_the_name(google, capsys, monkeypatch):
    """On a terminal the cluster's name must be typed; another word removes nothing."""
    assert call([*UP, "--accelerator=cpu"]) == 0
    type_in(monkeypatch, "prod")
    assert call(["down"]) == 2
    assert "That is not its name" in capsys.readouterr().err
    type_in(monkeypatch, "dev")
    assert call(["down"]) == 0
    assert google.clusters == {}


KIND = """\
#!{python}
import json, os, sys
folder = {folder!r}
words = sys.argv[1:]
with open(folder + "/calls", "a") as file:
    file.write(" ".join(words[:2]) + "\\n")
if words[:2] == ["get", "clusters"] and os.path.exists(folder + "/config"):
    print("dev")
if words[0] == "create":
    open(folder + "/config", "w").write(sys.stdin.read())
if "--kubeconfig" in words:
    with open(words[words.index("--kubeconfig") + 1], "w") as file:
        file.write(open(folder + "/kubeconfig").read())
if words[0] == "delete":
    os.remove(folder + "/config")
"""


def test_a_cluster_on_a_laptop(google, capsys, monkeypatch, tmp_path):
    """With programs that stand in for Docker and kind: nodes with the labels and chips of the
    slice, the same objects as on GKE, a profile; the second `up` changes nothing, `down` removes
    it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in (
        ("docker", "#!/bin/sh\n"),
        ("kind", KIND.format(python=sys.executable, folder=str(folder))),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    (folder / "kubeconfig").write_text(json.dumps(google.serve_kube("laptop", "kind-dev")))
    labels = {"cloud.google.com/gke-nodepool": "tpu-v6e-16-0"}

    def put_nodes(cluster):
        for number in range(4):
            meta = {"name": f"n{number}", "labels": labels | {"kinetic-cluster": cluster}}
            google.kubes["laptop"].put("v1", "nodes", "", {"kind": "Node", "metadata": meta})

    put_nodes("dev")
    up = ["up", "--kind", "--accelerator=v6e-16", "--cluster=dev", "-y", *INSTALLED]
    assert call(up) == 0
    kube = google.kubes["laptop"]
    assert kube.names("clusterqueues") == ["kinetic"]
    assert kube.objects["v1", "nodes", "", "n0"]["status"]["capacity"] == {"google.com/tpu": "4"}
    config = json.loads((folder / "config").read_text())
    workers = [node for node in config["nodes"] if node["role"] == "worker"]
    assert len(workers) == 4
    assert workers[0]["labels"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    count = len(google.changes)
    put_nodes("dev")  # The double's `apply` of a status loses labels.
    assert call(up) == 0
    assert [change for change in google.changes[count:] if "Node" not in change] == []
    assert (folder / "calls").read_text().count("create cluster") == 1
    assert call(["up", "--kind", "--accelerator=v6e-256", "-y", *INSTALLED]) == 4
    assert "at most 16" in capsys.readouterr().err
    assert call(["status"]) == 2
    assert "kind-dev is a cluster on this machine" in capsys.readouterr().err
    put_nodes("another")
    for words in (["down", "-y"], up):
        assert call(words) == 4
        assert "kinetic did not create it" in capsys.readouterr().err
    assert (folder / "config").exists()
    put_nodes("dev")
    assert call(["down", "-y"]) == 0
    assert not (folder / "config").exists()
    (folder / "kind").write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    assert call(up) == 4
    assert "`kind get clusters` failed: no daemon" in capsys.readouterr().err


# --- interruptions


def start(google: GoogleDouble, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_up_is_killed_after_every_step(google, tmp_path):
    """The process of `up` is killed (SIGKILL) after each change, before the answer reaches it, and
    started again: the end is the same as without, and nothing is made twice but the objects of a
    manifest, which are applied as a whole."""
    apart = tmp_path / "apart"
    apart.mkdir()
    with serving(apart) as other:
        os.environ |= other.environment()
        process = start(other, STANDARD)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        expected, in_order = state_of(other), list(other.changes)
    os.environ |= google.environment()
    kills = 0
    for _ in range(len(in_order) + 10):
        running: list[subprocess.Popen[str]] = []
        done = set(google.changes)

        def kill(change: str, running=running, done=done) -> None:
            if change not in done:
                running[0].send_signal(signal.SIGKILL)
                running[0].wait(LIMIT_S)
                raise Killed

        google.on_change = kill
        running.append(start(google, STANDARD))
        output, _ = running[0].communicate(timeout=LIMIT_S)
        if running[0].returncode == 0:
            break
        assert running[0].returncode == -signal.SIGKILL, output
        kills += 1
    assert kills == len(in_order)
    assert state_of(google) == expected
    of_manifests = ("jobset", "kueue.x-k8s.io", "kueue-")
    for change in set(google.changes):
        is_own = not any(word in change for word in of_manifests)
        assert google.changes.count(change) == 1 or not is_own, change


def test_two_ups_at_once(google):
    """Two people type the same command at the same time: one cluster, and both succeed."""
    both = [start(google, STANDARD) for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
    for change in google.changes:
        if change.startswith(("cluster", "pool", "bucket")):
            assert google.changes.count(change) == 1
