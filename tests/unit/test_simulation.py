"""What the local backend starts for a plan."""

from __future__ import annotations

import pytest
from laptop_fakes import plan

from kinetic._backends.local import simulation


@pytest.mark.parametrize(
    ("accelerator", "controller", "options", "modules"),
    [
        ("cpu", "multi", {}, []),
        ("tpu-v6e-16", "multi", {}, ["numpy", "jax"]),
        ("tpu-v6e-16", "multi", {"joins_jax": False}, []),
        ("tpu-v6e-16", "multi", {"env": {"XLA_FLAGS": ""}}, []),
        ("tpu-v6e-16", "single", {}, ["numpy", "jax"]),
        ("tpu-v6e-16", "single", {"joins_jax": False}, []),
    ],
)
def test_jax_is_imported_once_where_it_joins_hosts_or_has_the_devices_of_all(
    accelerator, controller, options, modules
):
    chosen = options | {"controller": controller}
    document = simulation.document(plan(accelerator=accelerator, options=chosen))
    assert document["preload"] == modules
