"""Calling decorated functions."""

from __future__ import annotations

import asyncio
import functools
import io
import secrets as random_bytes
import subprocess
import sys
import types
import warnings
from dataclasses import replace

import cloudpickle
import pytest
import remote_cases

import kinetic
from kinetic import errors
from kinetic._backends.local.backend import LocalBackend
from kinetic._client import decorator
from kinetic._store.local import LocalStore
from kinetic.job_status import JobStatus

backend = remote_cases.backend


def add(a, b=1):
    return a + b


class Callable_:
    def __call__(self, x):
        return x + 1


# -- calls, and kinds of functions -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: f(), "missing a required argument: 'a'"),
        (lambda f: f(1, 2, 3), "too many positional"),
        (lambda f: f(1, c=2), "unexpected keyword argument 'c'"),
        (lambda f: f(c=2), "unexpected keyword argument 'c'"),
        (lambda f: f(bb=2), "unexpected keyword argument 'bb' (did you mean 'b'?)"),
        (lambda f: f.run_async(), "missing"),
        (lambda f: f.plan(), "missing"),
    ],
)
def test_wrong_arguments_fail_before_anything_is_created(backend, home, call, words):
    with pytest.raises(TypeError) as caught:
        call(kinetic.run("cpu")(add))
    assert words in str(caught.value)
    assert "add(a, b=1)" in str(caught.value)
    assert backend.calls == []
    assert not home.exists()


@pytest.mark.parametrize(
    ("name", "instead"), [("map", "run_async_map"), ("remote", "run_async"), ("spawn", "run_async")]
)
def test_other_libraries_words_name_ours(name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(kinetic.run("cpu")(add), name)
    assert not hasattr(kinetic.run("cpu")(add), name)


@pytest.mark.starts_processes
def test_a_call(backend):
    remote = kinetic.run("cpu")(add)
    assert remote(2, b=3) == 5
    assert backend.calls == ["preflight", "render", "submit", "cleanup"]
    (handle,) = kinetic.list_jobs()
    assert (handle.display_name, handle.func_name, handle.accelerator) == ("add", "add", "cpu")
    assert kinetic.attach(handle.job_id).result() == 5


@pytest.mark.starts_processes
def test_submitting_without_waiting(backend):
    handle = kinetic.run("tpu-v6e-16")(add).run_async(2)
    assert handle.status() is JobStatus.SUCCEEDED
    assert handle.result() == 3
    assert (handle.hosts, handle.requested_backend, handle.backend) == (4, "pathways", "local")


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @kinetic.run("cpu")
    def fit(self, steps, *, twice=False):
        return self.rate * steps * (1 + twice)

    @staticmethod
    @kinetic.run("cpu")
    def free(x):
        return x

    @classmethod
    @kinetic.run("cpu")
    def of_class(cls, x):
        return cls.__name__, x

    @kinetic.run("cpu")
    @staticmethod
    def free_below(x):
        return x

    @kinetic.run("cpu")
    @classmethod
    def of_class_below(cls, x=1):
        return cls.__name__, x

    @classmethod
    @kinetic.run("cpu")
    def of_class_by_default(cls, x=1):
        return cls.__name__, x


class Tuner(Trainer):
    pass


async def call_later(x):
    return x + 1


KINDS = [
    (lambda: kinetic.run("cpu")(lambda x: x + 1)(1), 2, "<lambda>"),
    (lambda: kinetic.run("cpu")(functools.partial(add, b=5))(1), 6, "add"),
    (lambda: kinetic.run("cpu")(Callable_())(1), 2, "Callable_"),
    (lambda: kinetic.run("cpu")(call_later)(1), 2, "call_later"),
    (lambda: kinetic.run("cpu")([1, 2].count)(2), 1, "count"),
    (lambda: kinetic.run("cpu")(len)([1]), 1, "len"),
    (lambda: kinetic.run("cpu")(Trainer)(5).rate, 5, "Trainer"),
    (lambda: Trainer(3).fit(4, twice=True), 24, "fit"),
    (lambda: Trainer.fit(Trainer(3), 4), 12, "fit"),
    (lambda: Trainer(3).fit.run_async(4).result(), 12, "fit"),
    (lambda: Trainer.free(4), 4, "free"),
    (lambda: Trainer.of_class(4), ("Trainer", 4), "of_class"),
    (lambda: Trainer.free_below(4), 4, "free_below"),
    (lambda: Trainer(3).free_below(4), 4, "free_below"),
    (lambda: Tuner.of_class_below(4), ("Tuner", 4), "of_class_below"),
    (lambda: Tuner(3).of_class_below(), ("Tuner", 1), "of_class_below"),
    (lambda: Tuner.of_class_below.run_async(4).result(), ("Tuner", 4), "of_class_below"),
    (lambda: kinetic.run("cpu", name="my run")(add)(1), 2, "my run"),
]


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("call", "value", "name"), KINDS, ids=[k[2] + str(i) for i, k in enumerate(KINDS)]
)
def test_kinds_of_functions(backend, call, value, name):
    assert call() == value
    assert kinetic.list_jobs()[0].display_name.rpartition(".")[2] == name


def test_a_classmethod_below_arrives_as_one_with_its_class(backend):
    unpickled = cloudpickle.loads(cloudpickle.dumps(vars(Trainer)["of_class_below"]))
    assert isinstance(unpickled, classmethod)


@pytest.mark.starts_processes
def test_a_classmethod_above_that_hides_its_class_is_refused(backend):
    """Below @classmethod, a decorated function may be called without the class, as in Python 3.13.
    The error says to put @kinetic.run above @classmethod."""
    hidden = vars(Trainer)["of_class_by_default"].__func__
    with pytest.raises(TypeError, match=r"Put @kinetic\.run above @classmethod"):
        hidden.run_async(5)
    assert hidden.run_async(Tuner, 5).result() == ("Tuner", 5)


def test_an_async_function_called_here():
    assert kinetic.run("cpu")(call_later).local(1) == 2


def test_an_async_function_called_here_beside_a_running_loop():
    async def cell():
        return kinetic.run("cpu")(call_later).local(1)

    assert asyncio.run(cell()) == 2


def test_a_method_is_refused_with_wrong_arguments(backend):
    with pytest.raises(TypeError, match="missing a required argument: 'steps'"):
        Trainer(3).fit()


@pytest.mark.starts_processes
def test_nested_calls_run_the_body(backend):
    inner = kinetic.run("tpu-v6e-16")(add)

    @kinetic.run("cpu")
    def outer(x):
        return inner(x) * 10

    assert outer(1) == 20
    assert backend.calls.count("submit") == 1


@pytest.fixture
def on_host(monkeypatch, tmp_path):
    """Set the environment variables by which kinetic recognizes a worker."""
    monkeypatch.setenv("KINETIC_JOB_ID", "job-00000001")
    monkeypatch.setenv("KINETIC_PREEMPTION", str(tmp_path))


def test_a_call_on_a_host_runs_the_body(backend, on_host):
    assert kinetic.run("cpu")(add)(1) == 2
    assert backend.calls == []


def test_a_job_submits_no_jobs(backend, on_host):
    remote = kinetic.run("cpu")(add)
    for attempt in (
        lambda: remote.run_async(1),
        lambda: remote.run_async_map([1]),
        lambda: remote.plan(1),
    ):
        with pytest.raises(
            errors.UsageError, match=r"A job cannot submit other jobs. In a job, add\(...\) runs"
        ):
            attempt()
    assert remote.with_options(timeout=3)(1) == remote.local(1) == asyncio.run(remote.aio(1)) == 2
    assert backend.calls == []


def test_async_functions_within_a_job(on_host):
    remote = kinetic.run("cpu")(call_later)

    async def outer():
        return [await remote(1), await remote.aio(2)]

    assert asyncio.run(outer()) == [2, 3]
    assert remote(3) == 4


class OwnError(Exception):
    pass


@pytest.mark.starts_processes
def test_the_functions_exception_is_raised(backend):
    @kinetic.run("cpu")
    def fails():
        raise OwnError("no")

    with pytest.raises(OwnError, match="no") as caught:
        fails()
    assert "Remote traceback" in caught.value.__notes__[0]
    assert kinetic.list_jobs()[0].status() is JobStatus.FAILED


@pytest.mark.starts_processes
def test_an_argument_that_cannot_be_pickled_creates_nothing(backend, home):
    with pytest.raises(errors.PicklingError) as caught:
        kinetic.run("cpu")(add)(io.TextIOWrapper(io.BytesIO()))
    assert caught.value.component
    assert "submit" not in backend.calls
    assert not (home / "jobs").exists()


@pytest.mark.starts_processes
def test_secrets_and_captured_variables(backend, home, monkeypatch):
    value = random_bytes.token_hex(8)
    monkeypatch.setenv("MY_TOKEN", value)
    monkeypatch.setenv("APP_KEY", value)
    monkeypatch.setenv("APP_MODE", "fast")
    remote = kinetic.run(
        "cpu", env={"SEED": "1"}, secrets=["MY_TOKEN"], capture_env_vars=["APP_*"]
    )(add)
    assert remote(1) == 2
    assert backend.secrets == {"MY_TOKEN": value, "APP_KEY": value}
    stored = b"".join(p.read_bytes() for p in home.rglob("*") if p.is_file())
    assert value.encode() not in stored
    assert b"MY_TOKEN" in stored


def test_a_missing_secret_creates_nothing(backend, home):
    with pytest.raises(errors.UsageError, match="NO_SUCH_TOKEN, which secrets= names, is not set"):
        kinetic.run("cpu", secrets=["NO_SUCH_TOKEN"])(add)(1)
    assert not (home / "jobs").exists()


@pytest.mark.starts_processes
def test_a_stand_in_is_announced_once_on_stderr(backend, capsys):
    from kinetic._client.board import console

    console._printed.clear()
    remote = kinetic.run("tpu-v6e-16")(add)
    remote(1)
    remote(1)
    captured = capsys.readouterr()
    line = "kinetic: no cluster configured; simulating tpu-v6e-16 (4 hosts x 4 chips) here\n"
    assert captured.err == line
    assert captured.out == ""
    kinetic.run("tpu-v6e-8", backend="local")(add)(1)
    assert capsys.readouterr().err == ""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"project": "p"}, {}, "No kubeconfig was found at /nowhere"),
        ({}, {"KINETIC_CLUSTER": "c"}, "No kubeconfig was found at /nowhere"),
        (
            {"backend": "gke"},
            {"KINETIC_PROJECT": "p"},
            'simulate the job here, set backend="local"',
        ),
        ({}, {"KINETIC_PROJECT": "p"}, "or KINETIC_BACKEND=local"),
    ],
)
def test_clusters_that_this_version_cannot_use(backend, monkeypatch, options, environ, words):
    for name, value in ({"KUBECONFIG": "/nowhere"} | environ).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.PreflightError) as caught:
        kinetic.run("cpu", **options)(add)(1)
    assert words in str(caught.value)
    assert backend.calls == []


NOWHERE = "http://127.0.0.1:1"


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({"backend": "ray"}, {"RAY_ADDRESS": NOWHERE}),
        ({}, {"KINETIC_BACKEND": "ray", "RAY_API_SERVER_ADDRESS": NOWHERE}),
        ({}, {"KINETIC_ADDRESS": NOWHERE}),
    ],
)
def test_a_ray_cluster_that_does_not_answer(backend, monkeypatch, options, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.BackendUnavailable, match=f"Nothing answers at {NOWHERE} "):
        kinetic.run("cpu", **options)(add)(1)
    assert backend.calls == []


@pytest.mark.starts_processes
def test_an_address_of_rays_own_does_not_choose_ray(backend, monkeypatch):
    """Ray sets RAY_ADDRESS in the environment of its programs. The variable alone does not send a
    job to Ray."""
    monkeypatch.setenv("RAY_ADDRESS", NOWHERE)
    assert kinetic.run("cpu")(add)(1) == 2


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "environ",
    [{"GOOGLE_CLOUD_PROJECT": "p"}, {"KINETIC_BACKEND": "local", "KINETIC_PROJECT": "p"}, {}],
)
def test_what_is_simulated(backend, monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert kinetic.run("tpu-v5e-1")(add)(1) == 2


def test_a_backend_in_the_environment_that_does_not_exist(backend, monkeypatch):
    monkeypatch.setenv("KINETIC_BACKEND", "slurm")
    with pytest.raises(errors.UsageError, match="'slurm'"):
        kinetic.run("cpu")(add)(1)


@pytest.mark.starts_processes
def test_a_plan_creates_nothing(backend, home):
    view = kinetic.run("tpu-v6e-16", env={"SEED": "1"}, timeout=5)(add).plan(1)
    assert view.plan.hosts == 4
    assert view.plan.limits.timeout_s == 5
    assert view.documents[0]["hosts"] == 4
    assert backend.calls == ["render"]
    assert not home.exists()
    text = repr(view)
    assert text.startswith("Plan of add on tpu-v6e-16 (nothing was created)\n")
    assert "local (stands in for pathways)" in text
    assert "SEED" in text


@pytest.mark.starts_processes
def test_a_plan_says_in_words_what_would_be_created(backend, tmp_path):
    view = kinetic.run("tpu-v6e-16")(add).plan(1)
    store = LocalStore(tmp_path)
    documents = tuple(LocalBackend(store).render(view.plan))
    assert "  creates    simulated slice\n" in f"{replace(view, documents=documents)}\n"


# -- modules that are loaded, public names ---------------------------------------------------------


VENDORS = {
    "click",
    "rich",
    "grpc",
    "jax",
    "numpy",
    "pathspec",
    "cloudpickle",
    "tblib",
    "google",
    "kubernetes",
}


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "code",
    [
        "import kinetic",
        "import kinetic; kinetic.run('tpu-v6e-16')(len); kinetic.attach; kinetic.list_jobs()",
    ],
)
def test_importing_loads_no_vendor(code, home):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert not VENDORS & {name.partition(".")[0] for name in loaded}
    if "run" not in code:
        assert {name for name in loaded if name.startswith("kinetic")} == {
            "kinetic",
            "kinetic._shadows",
            "kinetic.version",
        }
        assert not {"logging", "dataclasses", "typing", "re"} & loaded


@pytest.mark.starts_processes
def test_planning_a_call_loads_only_what_a_call_needs(home, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, kinetic\n"
        "from kinetic._backends.local import launcher\n"
        "before = set(sys.modules)\n"
        "@kinetic.run('cpu')\n"
        "def noop(): return 1\n"
        "noop.plan()\n"
        "print(*(before & {'tempfile', 'shutil'}), 'and',"
        " *({'secrets', 'hmac', 'html', 'asyncio', 'click', 'grpc'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["and"]


def test_public_names():
    assert set(kinetic.__all__) <= set(dir(kinetic))
    for name in kinetic.__all__:
        assert getattr(kinetic, name) is not None
    assert kinetic.errors.KineticError is errors.KineticError
    with pytest.raises(AttributeError, match="no attribute 'submit'"):
        kinetic.submit  # noqa: B018


def test_decorating_warns_about_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kinetic.run("cpu")(add)


# -- processes that warm up during planning --------------------------------------------------------


def warmed(backend, monkeypatch):
    names = []

    def warm_up(*, needs_jax, variables, libraries):
        names.append((needs_jax, sorted(variables), list(backend.calls)))

    monkeypatch.setattr(backend, "warm_up", warm_up, raising=False)
    return names


@pytest.mark.starts_processes
def test_the_backend_may_warm_up_before_the_call_is_planned(backend, monkeypatch):
    names = warmed(backend, monkeypatch)
    monkeypatch.setenv("SEED", "1")
    kinetic.run(accelerator="tpu-v6e-16", env={"XLA_FLAGS": ""}, capture_env_vars=["SEED"])(add)(1)
    assert names == [(True, ["SEED", "XLA_FLAGS"], [])]


@pytest.mark.parametrize(
    ("module", "environ", "warms"),
    [
        ("__main__", {}, True),
        ("project.train", {}, False),
        ("__mp_main__", {}, False),
        ("__main__", {"KINETIC_PRELOAD": "off"}, False),
        ("__main__", {"KINETIC_JOB_ID": "job-1", "KINETIC_PREEMPTION": "/"}, False),
        ("__main__", {"KINETIC_JOB_ID": "job-1"}, True),
        ("__main__", {"KINETIC_PRELOAD": "sometimes"}, False),
    ],
)
def test_a_script_warms_up_for_the_first_function_that_it_decorates(
    backend, monkeypatch, module, environ, warms
):
    monkeypatch.setattr(decorator, "_decorated", [])
    names = warmed(backend, monkeypatch)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for accelerator in ("tpu-v6e-16", "cpu"):
        func = types.FunctionType(add.__code__, {"__name__": module})
        kinetic.run(accelerator=accelerator)(func)
    assert names == [(True, [], [])] * warms


@pytest.mark.starts_processes
def test_a_call_that_is_refused_or_may_not_be_preloaded_warms_nothing_up(backend, monkeypatch):
    names = warmed(backend, monkeypatch)
    with pytest.raises(TypeError):
        kinetic.run(accelerator="cpu")(add)()
    monkeypatch.setenv("KINETIC_PRELOAD", "off")
    kinetic.run(accelerator="cpu")(add)(1)
    assert names == []
