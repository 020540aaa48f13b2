"""The caller's JAX options that a job sets on its hosts."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kinetic._config import jax_options
from kinetic._host.worker import jaxworld


class Promotion(enum.Enum):
    STANDARD = "standard"
    STRICT = "strict"


@pytest.fixture
def jax_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the module `jax` by a fake with the given options."""

    def put(**options: object) -> None:
        promotion = {"jax_numpy_dtype_promotion": Promotion.STANDARD}
        config = SimpleNamespace(values={**jax_options.DEFAULTS, **promotion, **options})
        monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))

    return put


def test_no_options_are_sent_if_jax_has_its_defaults(jax_with: Any) -> None:
    jax_with()
    assert jax_options.changed_options(without={}) == {}


def test_options_that_were_set_travel_by_plain_values(jax_with: Any) -> None:
    jax_with(
        jax_enable_x64=True,
        jax_default_matmul_precision="float32",
        jax_numpy_dtype_promotion=Promotion.STRICT,
    )
    wanted = {
        "jax_enable_x64": True,
        "jax_default_matmul_precision": "float32",
        "jax_numpy_dtype_promotion": "strict",
    }
    assert jax_options.changed_options(without={}) == wanted
    assert jax_options.changed_options(without={"JAX_ENABLE_X64": "0"}) == {
        k: v for k, v in wanted.items() if "x64" not in k
    }


def test_options_that_choose_platforms_and_devices_are_not_sent(jax_with: Any) -> None:
    jax_with(jax_platforms="cpu", jax_num_cpu_devices=8, jax_unknown_option=1)
    assert jax_options.changed_options(without={}) == {}


def test_without_jax_nothing_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert jax_options.changed_options(without={}) == {}


def test_the_table_has_the_defaults_of_the_installed_jax() -> None:
    import jax

    assert set(jax_options.DEFAULTS) <= set(jax.config.values)
    assert jax_options.changed_options(without={}) == {}


def test_an_option_that_the_hosts_jax_lacks_is_named() -> None:
    assert jaxworld.set_options({"jax_no_such_option": 1, "jax_debug_nans": False}) == [
        "jax_no_such_option"
    ]


@pytest.mark.starts_processes
def test_arrays_of_64_bits_come_back_whole() -> None:
    code = """
import jax, jax.numpy as jnp
from kinetic._pickling import results
with jax.enable_x64(True):
    data = results.pack_value([jnp.array(2**40 + 5), jnp.array(0.1), jnp.ones(2, "float32")])
for array in results.unpack_value(data):
    print(array.tolist(), array.dtype)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1099511627781 int64", "0.1 float64", "[1.0, 1.0] float32"]
