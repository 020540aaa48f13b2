"""`kinetic run --dry-run -o yaml|json` prints the objects of a cluster in the form that kubectl
accepts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from laptop_fakes import FakeBackend

from kinetic._backends import registry
from kinetic._backends.kubernetes import manifests
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic.cli.root import call

PROGRAM = "import sys\nprint('$', sys.argv)\n"
SETTINGS = PodSettings(image="python:3.11", store_uri="gs://lab", bootstrap=PROGRAM)
KINDS = [("jobset.x-k8s.io/v1alpha2", "JobSet"), ("v1", "Secret")]


class Rendering(FakeBackend):
    """A backend that renders the objects of a cluster."""

    name = "gke"

    def render(self, plan):
        return manifests.render(plan, SETTINGS)


@pytest.fixture
def dry_run(home, tmp_path, monkeypatch, capsys):
    """Return a function that runs `kinetic run` for a cluster; it returns exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINETIC_CLUSTER", "tpus")
    Path("train.py").touch()

    def run(*words):
        argv = ["run", "-a", "tpu-v6e-16", "--backend", "gke", *words, "train.py"]
        with registry.substitute_backend("gke", lambda _, store: Rendering(store)):
            code = call(argv)
        return code, capsys.readouterr()

    return run


def program(workload):
    template = workload["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return template["spec"]["containers"][0]["command"][2]


def kinds(documents):
    return [(each["apiVersion"], each["kind"]) for each in documents]


def test_yaml_is_what_was_rendered(dry_run):
    code, printed = dry_run("--dry-run", "-o", "yaml", "--queue", "team")
    assert code == 0
    workload, secret = documents = list(yaml.safe_load_all(printed.out))
    assert kinds(documents) == KINDS
    assert program(workload) == PROGRAM.replace("$", "$$")
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert secret["stringData"]["token"] == ""
    assert "- |\n" in printed.out, "programs are readable"


def test_json_is_one_list(dry_run):
    document = json.loads(dry_run("--dry-run", "-o", "json")[1].out)
    assert (document["apiVersion"], document["kind"], kinds(document["items"])) == (
        "v1",
        "List",
        KINDS,
    )


def test_what_pods_get_is_shown(dry_run):
    options = ("--slices", "2", "--local-storage", "60 GB", "--network-devices", "all")
    items = json.loads(dry_run("--dry-run", "-o", "json", *options)[1].out)["items"]
    assert kinds(items) == [*KINDS, ("resource.k8s.io/v1", "ResourceClaimTemplate")]
    pod = items[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "60G"}
    assert pod["resourceClaims"][0]["resourceClaimTemplateName"] == items[2]["metadata"]["name"]


def test_without_the_package_yaml_is_json(dry_run, monkeypatch):
    for name in ("kubernetes", "yaml"):  # kubernetes depends on yaml.
        monkeypatch.setitem(sys.modules, name, None)
    _, printed = dry_run("--dry-run", "-o", "yaml")
    monkeypatch.undo()
    assert kinds(yaml.safe_load_all(printed.out)) == KINDS
    assert kinds(map(json.loads, printed.out.split("---\n"))) == KINDS


@pytest.mark.parametrize("words", [("-o", "yaml"), ("--dry-run", "--json", "-o", "json")])
def test_the_output_option_needs_a_dry_run_and_excludes_json(dry_run, words):
    code, printed = dry_run(*words)
    assert code == 2
    assert "works only with --dry-run and without --json" in printed.err


def test_a_plan_shows_what_would_be_created(dry_run):
    _, printed = dry_run("--dry-run")
    assert "creates    JobSet, Secret" in printed.out
