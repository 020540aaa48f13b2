"""What a job takes along of the caller's JAX configuration."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kinetic._config import jax_options
from kinetic._host.worker import jaxworld


class Promotion(enum.Enum):
    STANDARD = "standard"
    STRICT = "strict"


DEFAULTS = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_platforms": None,
    "jax_num_cpu_devices": -1,
    "jax_debug_nans": False,
}


@pytest.fixture
def jax_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a JAX with these options in the place of the real one; its defaults have been read
    before."""

    def put(version: str = "0.0.test", **options: object) -> Path:
        values = DEFAULTS | {"jax_numpy_dtype_promotion": Promotion.STANDARD} | options
        monkeypatch.setitem(
            sys.modules,
            "jax",
            SimpleNamespace(__version__=version, config=SimpleNamespace(values=values)),
        )
        (tmp_path / f"jax-{version}-defaults.json").write_text(json.dumps(DEFAULTS))
        return tmp_path

    monkeypatch.setattr(jax_options, "_KNOWN", {})
    return put


def test_nothing_travels_when_jax_is_as_it_comes(jax_with: Any) -> None:
    assert jax_options.changed_options(jax_with(), without={}) == {}


def test_what_was_set_travels_by_plain_values(jax_with: Any) -> None:
    cache = jax_with(
        jax_enable_x64=True,
        jax_default_matmul_precision="float32",
        jax_numpy_dtype_promotion=Promotion.STRICT,
    )
    wanted = {
        "jax_enable_x64": True,
        "jax_default_matmul_precision": "float32",
        "jax_numpy_dtype_promotion": "strict",
    }
    assert jax_options.changed_options(cache, without={}) == wanted
    assert jax_options.changed_options(cache, without={"JAX_ENABLE_X64": "0"}) == {
        k: v for k, v in wanted.items() if "x64" not in k
    }


def test_where_jax_runs_is_the_hosts_business(jax_with: Any) -> None:
    cache = jax_with(jax_platforms="cpu", jax_num_cpu_devices=8, jax_unknown_option=1)
    assert jax_options.changed_options(cache, without={}) == {}


def test_without_jax_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert jax_options.changed_options(tmp_path, without={}) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_defaults_of_the_real_jax_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    monkeypatch.setattr(jax_options, "_KNOWN", {})
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")  # must not pass for a default
    place = tmp_path / "cache"
    jax_options.changed_options(place, without={})
    (file,) = place.iterdir()
    found = json.loads(file.read_text())
    assert (found["jax_enable_x64"], found["jax_debug_nans"]) == (False, False)
    file.write_text(json.dumps(found | {"jax_enable_x64": True}))
    monkeypatch.setattr(jax_options, "_KNOWN", {})
    assert jax_options.changed_options(place, without={}).get("jax_enable_x64") is (
        None if jax.config.jax_enable_x64 else False
    )


def test_an_option_that_the_hosts_jax_lacks_is_named() -> None:
    assert jaxworld.set_options({"jax_no_such_option": 1, "jax_debug_nans": False}) == [
        "jax_no_such_option"
    ]


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
