"""The decorator: refused options, returned objects, and a whole call on a backend in memory."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import subprocess
import sys
import textwrap

import cloudpickle
import pytest
import remote_cases

import kinetic
from kinetic import errors
from kinetic._client.remote import RemoteCallable

backend = remote_cases.backend


def add(a, b=1):
    return a + b


# -- options that the decorator refuses ------------------------------------------------------------


def generator():
    yield 1


async def async_generator():
    yield 1


class CallableGenerator:
    def __call__(self):
        yield 1


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (functools.lru_cache(add), "above @kinetic.run"),
        (3, "must decorate a function"),
        (None, "must decorate a function"),
        (property(add), "must decorate a function"),
        (generator, "return a list"),
        (async_generator, "return a list"),
        (functools.partial(generator), "return a list"),
        (CallableGenerator(), "return a list"),
        (kinetic.run("cpu")(add), "already decorated with @kinetic.run"),
    ],
)
def test_things_that_cannot_run_on_a_host(thing, words):
    with pytest.raises(errors.UsageTypeError, match=words):
        kinetic.run("cpu")(thing)


def test_forgotten_parentheses():
    with pytest.raises(TypeError, match="with parentheses"):

        @kinetic.run
        def train():
            pass


# -- objects that the decorator returns ------------------------------------------------------------


@pytest.mark.starts_processes
def test_a_decorator_below_may_give_the_function_arguments_of_its_own(backend):
    def with_seed(function):
        @functools.wraps(function)
        def seeded(steps):
            return function(7, steps)

        return seeded

    @kinetic.run("cpu")
    @with_seed
    def train(seed, steps):
        return seed, steps

    assert train(3) == (7, 3)
    with pytest.raises(
        errors.UsageTypeError,
        match=r"^train\(steps\): too many positional arguments. Nothing was submitted.$",
    ):
        train(7, 3)


def test_a_decorated_function_has_the_name_and_docstring_of_the_function():
    @kinetic.run("tpu-v6e-16")
    def train(steps: int) -> int:
        """Train."""
        return steps

    train_doc, module = train.__doc__, train.__module__
    assert (train.__name__, train_doc, module) == ("train", "Train.", __name__)
    assert train.__wrapped__(3) == 3
    assert train.local(3) == 3
    assert "train on tpu-v6e-16" in repr(train)
    assert copy.copy(train) is train
    assert copy.deepcopy([train])[0] is train


def test_the_positional_order_of_older_scripts():
    options = kinetic.run(
        "cpu",
        "image",
        "repo",
        "zone",
        "project",
        ["A"],
        "cluster",
        "gke",
        "space",
        {},
        True,
        "out",
        False,
    )(add).options
    assert (options.container_image, options.base_image_repo, options.zone, options.project) == (
        "image",
        "repo",
        "zone",
        "project",
    )
    assert (options.capture_env_vars, options.cluster, options.backend, options.namespace) == (
        ("A",),
        "cluster",
        "gke",
        "space",
    )
    assert (options.topology.spot, options.output_dir, options.debug) == (True, "out", False)


def test_the_default_accelerator():
    assert kinetic.run()(add).options.topology.name.startswith("tpu-v5")


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_a_decorated_callable_is_unpickled_as_the_plain_callable(dumps):
    plain = pickle.loads(dumps(kinetic.run("cpu")(functools.partial(operator.add, 1))))
    assert not isinstance(plain, RemoteCallable)
    assert plain(2) == 3


@kinetic.run("cpu")
def triple(number):
    return 3 * number


def test_pickle_refers_to_a_decorated_function_by_its_name():
    assert pickle.loads(pickle.dumps(triple)) is triple
    assert pickle.loads(pickle.dumps([triple]))[0] is triple
    plain = pickle.loads(cloudpickle.dumps(triple))
    assert not isinstance(plain, RemoteCallable)
    assert plain(2) == 6


@pytest.mark.starts_processes
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_processes_of_a_pool_can_call_a_decorated_function(kind, tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import multiprocessing
        import kinetic

        @kinetic.run("cpu")
        def triple(number):
            return 3 * number

        def name_of(function):
            return type(function).__name__

        if __name__ == "__main__":
            with multiprocessing.get_context("{kind}").Pool(1) as pool:
                print(pool.apply(name_of, [triple]), pool.map(triple.local, [1, 2]))
        """)
    )
    run = [sys.executable, "-W", "ignore", "script.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "RemoteCallable [3, 6]\n", done.stderr


@pytest.mark.starts_processes
def test_a_cloudpickled_function_is_loaded_without_kinetic(tmp_path):
    namespace = {"__name__": "__main__"}
    exec("def outer(n):\n    return 0 if n == 0 else 1 + outer(n - 1)", namespace)
    namespace["outer"] = kinetic.run("cpu")(namespace["outer"])
    (tmp_path / "call.pkl").write_bytes(cloudpickle.dumps(namespace["outer"]))
    code = """
        import pickle, sys
        sys.modules["kinetic"] = None
        outer = pickle.load(open("call.pkl", "rb"))
        print(outer(3), type(outer).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "3 function\n", done.stderr
