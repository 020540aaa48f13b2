"""Options of the decorator: values that it refuses, and `with_options` for a single call."""

from __future__ import annotations

import inspect
import json
from datetime import timedelta

import pytest
import remote_cases

import kinetic
from kinetic import errors
from kinetic._client.options import OptionChanges
from kinetic._core.options import MAX_FAILURES, SLICE_TIMEOUT_S, TABLE, Elastic, Options

backend = remote_cases.backend


def add(a, b=1):
    return a + b


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @kinetic.run("cpu")
    def fit(self, steps, *, twice=False):
        return self.rate * steps * (1 + twice)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accelerator": "tpu-v6e-12"}, "v6e"),
        ({"accelerator": ""}, ""),
        ({"accelerator": None}, "NoneType"),
        ({"backend": "slurm"}, "Backends are: gke, pathways, local, ray."),
        ({"backend": "programs"}, 'Use "local", which simulates the same slice'),
        ({"backend": ""}, "backend must not be empty"),
        ({"project": 7}, "project must be a string"),
        ({"queue": "a b"}, "queue may have at most 63 letters"),
        ({"priority": "x" * 64}, "priority may have at most 63 letters"),
        ({"reservation": 7}, "reservation must be a string"),
        ({"reservation": "projects/a/next-week"}, "reservation may have at most 63"),
        ({"reservation": "projects//reservations/b"}, "reservation may have at most 63"),
        ({"reservation": "a b"}, "reservation may have at most 63 letters"),
        (
            {"reservation": "next-week", "accelerator": "tpu-v6e-16:spot"},
            "a spot machine cannot be reserved. Remove one of them.",
        ),
        ({"local_storage": 60}, "local_storage must be a string"),
        ({"local_storage": "60"}, 'local_storage must be a size with its unit, such as "60Gi"'),
        ({"local_storage": "0Gi"}, "local_storage must be a size"),
        ({"local_storage": "mtc"}, "or \"multi-tier\"; got 'mtc'"),
        (
            {"local_storage": "1Gi", "controller": "single", "accelerator": "tpu-v6e-16"},
            "local_storage= is memory of hosts that both run the function",
        ),
        ({"memory": "16"}, 'memory must be a size with its unit, such as "60Gi"'),
        ({"memory": 16}, "memory must be a string"),
        ({"shm": "0Gi"}, "shm must be a size with its unit"),
        ({"cpu": True}, "cpu must be a number of processors, such as 4; got True"),
        ({"cpu": 0}, 'cpu must be a number of processors, such as 4, 0.5 or "500m"; got 0'),
        ({"cpu": "0.5m"}, "cpu must be a number of processors"),
        ({"cpu": float("nan")}, "cpu must be a number of processors"),
        ({"cpu": -1}, "cpu must be a number of processors"),
        ({"privileged": "yes"}, "privileged must be True or False"),
        ({"compare_programs": "all"}, 'compare_programs must be "inputs", "strict", True or False'),
        ({"pathways_flags": {"server": "--v=1"}}, "the Pathways processes of a job with"),
        ({"pathways_flags": "--v=1"}, "pathways_flags must be a dict such as"),
        ({"pathways_flags": {"proxy": "--v=1"}}, "no component 'proxy'. Components are: server, p"),
        (
            {"pathways_flags": {"worker": "-v 1"}},
            "must consist of flags such as --flag=1",
        ),
        ({"pathways_flags": {"worker": "--v='1"}}, "one line of flags, quoted as in a shell"),
        ({"pathways_flags": {"worker": 1}}, "must be a dict of flags and their values"),
        ({"network_devices": 0}, "network_devices must be 1 or more"),
        ({"network_devices": True}, "network_devices must be a number such as 2"),
        ({"network_devices": "two"}, "a number such as 2, or \"all\"; got 'two'"),
        ({"network_devices": 2, "accelerator": "tpu-v6e-16"}, "this job has slices=1 on tpu-v6e"),
        (
            {"network_devices": 2, "slices": 2},
            "this job has slices=2 on cpu. Remove network_devices=",
        ),
        (
            {
                "network_devices": "all",
                "slices": 2,
                "controller": "single",
                "accelerator": "tpu-v6e-16",
            },
            'this job has controller="single" on tpu-v6e-16',
        ),
        ({"slices": 0}, "slices must be 1 or more"),
        ({"slices": -1}, "slices must be 1 or more"),
        ({"slices": True}, "slices must be a whole number"),
        ({"slices": 2.0}, "slices must be a whole number"),
        ({"slices": (1, 2, 3)}, "slices must be a number, or the least and the most"),
        ({"slices": "1:2"}, "slices must be a number, or the least and the most"),
        ({"slices": (0, 2)}, "slices[0] must be 1 or more"),
        ({"slices": (1, "2")}, "slices[1] must be a whole number"),
        ({"slices": (3, 2)}, "slices takes the smaller number first: write (2, 3), not (3, 2)"),
        ({"slices": (1, 1)}, "has no slice to lose: an elastic job needs two or more"),
        (
            {"slices": (1, 2), "retries": 1, "accelerator": "tpu-v6e-8", "controller": "single"},
            "use max_failures= to limit",
        ),
        ({"slices": (1, 2), "debug": True}, "debug=True does not work with slices=(least, most)"),
        (
            {
                "slices": (1, 2),
                "controller": "single",
                "accelerator": "tpu-v6e-16",
                "joins_jax": "program",
            },
            "Run a Python script or module (without --)",
        ),
        ({"max_failures": 3}, "max_failures= is for elastic jobs"),
        ({"slices": 2, "slice_timeout": 3}, "slice_timeout= is for elastic jobs"),
        ({"slices": 2, "on_slice_loss": "wait"}, "on_slice_loss= is for elastic jobs"),
        ({"slices": (1, 2), "max_failures": -1}, "max_failures must be 0 or more"),
        ({"slices": (1, 2), "slice_timeout": 0}, "slice_timeout must be more than 0"),
        ({"slices": (1, 2), "on_slice_loss": "stop"}, 'on_slice_loss must be "wait" or "shrink"'),
        ({"controller": "one"}, 'controller must be "single" or "multi"; got \'one\''),
        ({"controller": None}, 'controller must be "single" or "multi"; got None'),
        ({"controller": "single"}, "machines with 4 or 8 chips. cpu is none of these"),
        ({"controller": "single", "accelerator": "tpu-v6e-1"}, "tpu-v6e-1 is none of these"),
        ({"controller": "single", "accelerator": "tpu-v3-32"}, "tpu-v3-32 is none of these"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"timeout": -1}, "timeout must be more than 0"),
        (
            {"timeout": "5 parsecs"},
            "timeout must be a duration above zero; got '5 parsecs'. Write 90,",
        ),
        ({"hang_timeout": "-5m"}, "hang_timeout must be a duration above zero; got '-5m'"),
        ({"start_timeout": timedelta()}, "start_timeout must be more than 0"),
        ({"timeout": [5]}, "timeout must be a number of seconds"),
        ({"timeout": True}, "timeout must be a number of seconds"),
        ({"hang_timeout": float("inf")}, "hang_timeout must be more than 0 seconds and finite"),
        ({"start_timeout": float("nan")}, "start_timeout must be more than 0"),
        ({"retries": -1}, "retries must be 0 or more"),
        ({"retries": False}, "retries must be a whole number"),
        ({"env": ["A=1"]}, "env must be a dict"),
        ({"env": {"A B": "1"}}, "env must name environment variables"),
        ({"env": {"A": 1}}, "Write '1'"),
        ({"env": {"A": "x\0"}}, "NUL"),
        ({"env": {"A": "\ud800"}}, "broken Unicode"),
        ({"timeout": 10**400}, "timeout must be more than 0"),
        ({"output_dir": "\ud800"}, "output_dir must be a path"),
        ({"env": {1: "x"}}, "strings"),
        ({"secrets": "HF_TOKEN"}, "secrets must be a list"),
        (
            {"secrets": ["A-B"]},
            "must name environment variables, which have letters, digits and '_'; got 'A-B'",
        ),
        ({"secrets": ["A"], "env": {"A": "1"}}, "A is in both env= and secrets="),
        (
            {"env": {"PYTHONHOME": "/opt"}},
            "env cannot set PYTHONHOME, because each host sets it. Remove PYTHONHOME.",
        ),
        ({"env": {"A": "x" * 131_070}}, "env['A'] has 131,073 bytes, but Linux allows 131,072"),
        ({"env": {"KINETIC_ATTEMPT": "9"}}, "env cannot set KINETIC_ATTEMPT, because each host"),
        ({"env": {"KINETIC_OUTPUT_DIR": "/x"}}, "Use output_dir="),
        ({"capture_env_vars": "A"}, "capture_env_vars must be a list"),
        ({"capture_env_vars": ["A*B"]}, "capture_env_vars"),
        ({"volumes": ["/data"]}, "volumes must be a dict"),
        ({"volumes": {"data": 1}}, "must be absolute paths, such as '/data'; got 'data'"),
        ({"volumes": {"/data": 1}}, "must be kinetic.Data"),
        ({"spot": 1}, "spot must be True or False"),
        ({"debug": "yes"}, "debug must be True or False"),
        ({"output_dir": 5}, "output_dir must be a string"),
        ({"container_image": "Python:3.11"}, "'Python:3.11'"),
        ({"container_image": "python 3.11"}, "container_image must be"),
        ({"container_image": "https://example.com/a"}, "container_image must be"),
        ({"container_image": "a/b:"}, "container_image must be"),
        ({"container_image": "a@sha256:12"}, "container_image must be"),
    ],
)
def test_bad_options_fail_at_decoration(options, words):
    with pytest.raises(errors.UsageError) as caught:
        kinetic.run(**{"accelerator": "cpu"} | options)
    assert words in str(caught.value)
    with pytest.raises(type(caught.value)) as second:
        kinetic.run("cpu")(add).with_options(**options)
    assert str(second.value) == str(caught.value)


@pytest.mark.parametrize(
    ("value", "stored"),
    [("60Gi", "60Gi"), ("57579Mi", "57579Mi"), ("60.5 GB", "60.5G"), ("multi-tier", "multi-tier")],
)
def test_memory_for_local_checkpoints(value, stored):
    assert kinetic.run("cpu", local_storage=value)(add).options.local_storage == stored


@pytest.mark.parametrize(("value", "stored"), [(2, "2"), ("2", "2"), ("all", "all"), (None, None)])
def test_network_devices(value, stored):
    remote = kinetic.run("tpu-v6e-16", slices=2, network_devices=value)(add)
    assert remote.options.network_devices == stored


@pytest.mark.parametrize(
    "image",
    [
        "bundled",
        "python:3.11-slim",
        "localhost:5000/a/b",
        "us-docker.pkg.dev/my-project/repo/my_image__x:V1.0-rc",
        f"Example.com/a@sha256:{'0' * 64}",
        f"ghcr.io/a.b/c:latest@sha256:{'0' * 64}",
    ],
)
def test_images(image):
    assert kinetic.run("cpu", container_image=image)(add).options.container_image == image


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90, 90), ("90s", 90), ("1h30m", 5400), (timedelta(minutes=2), 120), (None, None)],
)
def test_lengths_of_time(value, seconds):
    options = kinetic.run("cpu", timeout=value, start_timeout=value, hang_timeout=value)(
        add
    ).options
    assert (options.timeout_s, options.start_timeout_s, options.hang_timeout_s) == (seconds,) * 3


@pytest.mark.parametrize("value", [0, "0s", timedelta(0)])
def test_a_limit_of_no_time_is_refused_as_such(value):
    with pytest.raises(errors.UsageError, match="must be more than 0 seconds"):
        kinetic.run("cpu", timeout=value)


def test_slices_are_joined():
    for accelerator, hosts in (("cpu:2", 4), ("gpu-h100x8", 4), ("tpu-v6e-16", 16)):
        remote = kinetic.run(accelerator)(add).with_options(slices=4)
        assert remote.options.slices * remote.options.topology.hosts == hosts


def test_an_elastic_job_has_a_least_and_a_most():
    remote = kinetic.run("tpu-v6e-8", slices=(1, 3), on_slice_loss="shrink", max_failures=2)(add)
    assert remote.options.elastic == Elastic(1, 3, 2, SLICE_TIMEOUT_S, shrinks=True)
    assert remote.options.most_slices == 3
    assert Options.from_json(json.loads(json.dumps(remote.options.to_json()))) == remote.options
    fixed = remote.with_options(slices=2, on_slice_loss=None, max_failures=None)
    assert (fixed.options.elastic, fixed.options.most_slices) == (None, 2)
    usual = kinetic.run("cpu", slices=[2, 2], slice_timeout="90s")(add).options.elastic
    assert usual == Elastic(2, 2, MAX_FAILURES, 90.0)


def test_a_single_controller_has_slices_of_several_hosts():
    remote = kinetic.run("tpu-v6e-16", slices=4, controller="single")(add)
    assert (remote.options.slices, remote.options.controller) == (4, "single")
    elastic = remote.with_options(slices=(2, 4), max_failures=3, on_slice_loss="shrink").options
    assert elastic.elastic == Elastic(2, 4, 3, 300.0, shrinks=True)


# -- with_options ----------------------------------------------------------------------------------


@pytest.mark.starts_processes
def test_other_options_for_one_call(backend):
    remote = kinetic.run("tpu-v6e-16:spot", timeout="1h", env={"A": "1"}, name="train")(add)
    other = remote.with_options(accelerator="cpu", timeout=None, env={"B": "2"})
    assert (other.options.topology.name, other.options.timeout_s, other.options.env) == (
        "cpu:spot",
        None,
        {"B": "2"},
    )
    assert other.options.name == "train"
    assert (remote.options.timeout_s, remote.options.env) == (3600, {"A": "1"})
    assert (
        other.with_options(spot=False).options.topology == kinetic.run("cpu")(add).options.topology
    )
    assert remote.with_options(spot=False).options.topology.name == "tpu-v6e-16"
    assert remote.with_options().options == remote.options
    assert other(2, b=3) == 5
    assert kinetic.list_jobs()[0].accelerator == "cpu:spot"


@pytest.mark.starts_processes
def test_other_options_of_a_method(backend):
    assert Trainer(3).fit.with_options(name="fast")(4, twice=True) == 24
    assert kinetic.list_jobs()[0].display_name == "fast"


def test_with_options_takes_what_the_decorator_takes():
    parameters = set(inspect.signature(kinetic.run).parameters)
    assert set(OptionChanges.__annotations__) == parameters == set(TABLE)
    assert {
        field.removesuffix("_s").removesuffix("_usd") for field in Options.__dataclass_fields__
    } == parameters - {
        "accelerator",
        "spot",
    } | {"topology"}
    by_position = inspect.signature(kinetic.run, follow_wrapped=False).parameters
    assert {n: p.default for n, p in by_position.items()} == {
        n: r.default for n, r in TABLE.items()
    }


def test_the_decorator_is_documented_by_the_table():
    for row in TABLE.values():
        words = f"{row.name}: {row.help}"
        assert words in " ".join(kinetic.run.__doc__.split()), row.name


def test_options_travel_in_the_plan_whole_and_small():
    remote = kinetic.run(
        "cpu:2",
        slices=2,
        retries=1,
        env={"A": "1"},
        secrets=["B"],
        timeout=5,
        joins_jax="program",
        all_hosts=True,
        namespace="team-a",
        output_dir="/out",
    )(add)
    sent = remote.options.strip_for_hosts()
    document = json.loads(json.dumps(sent.to_json()))
    assert set(document) == {"topology", "slices", "retries", "env", "joins_jax", "all_hosts"}
    assert Options.from_json(document | {"unknown": 1}) == sent
    assert set(kinetic.run("cpu")(add).options.to_json()) == {"topology"}


def test_an_option_that_does_not_exist():
    with pytest.raises(TypeError, match=r"has no option 'retires'; did you mean retries=\?"):
        kinetic.run("cpu", retires=1)
    with pytest.raises(TypeError, match=r"has no option 'timeouts'; did you mean timeout=\?"):
        kinetic.run("cpu")(add).with_options(timeouts=1)
    with pytest.raises(errors.UsageError, match="A is in both env= and secrets="):
        kinetic.run("cpu", env={"A": "1"})(add).with_options(secrets=["A"])


def test_debugging_on_machines_that_may_go_away_warns_again():
    with pytest.warns(UserWarning, match="preemptible") as caught:
        kinetic.run(spot=True)(add).with_options(debug=True)
    assert caught[0].filename == __file__


def test_type_errors_are_type_errors_and_value_errors():
    with pytest.raises(TypeError):
        kinetic.run(slices="2")
    with pytest.raises(ValueError, match="slices"):
        kinetic.run(slices=0)


def test_debugging_on_machines_that_may_go_away_warns():
    for options in ({"accelerator": "tpu-v5e-1", "spot": True}, {"accelerator": "tpu-v5e-1:spot"}):
        with pytest.warns(UserWarning, match="preemptible") as caught:
            kinetic.run(debug=True, **options)
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("value", "stored"),
    [(4, "4"), (0.5, "0.5"), ("500m", "500m"), ("4", "4"), (96.0, "96"), (None, None)],
)
def test_processors(value, stored):
    assert kinetic.run("cpu", cpu=value)(add).options.cpu == stored


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"worker": {"v": 1, "--fast": True}}, {"worker": ["--v=1", "--fast=true"]}),
        ({"server": "--a=1 --b='two words'"}, {"server": ["--a=1", "--b=two words"]}),
        ({"worker": "--nofast --v=2"}, {"worker": ["--nofast", "--v=2"]}),
        (None, {}),
    ],
)
def test_flags_of_pathways(value, stored):
    options = {"accelerator": "tpu-v6e-16", "controller": "single", "pathways_flags": value}
    assert kinetic.run(**options)(add).options.pathways_flags == stored
