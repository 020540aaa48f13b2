"""Options of JAX that the caller has set and that change results: hosts must set them as well.

`jax.config.update("jax_enable_x64", True)` at the top of a script is not part of a function.
Without this module, the function would compute in float32 on the hosts. Other options, such as
JAX's platform and logging, are left to the host.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

Value = bool | int | float | str | None

DEFAULTS: Mapping[str, Value] = {
    "jax_check_tracer_leaks": False,
    "jax_debug_infs": False,
    "jax_debug_key_reuse": False,
    "jax_debug_nans": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_disable_most_optimizations": False,
    "jax_enable_checks": False,
    "jax_enable_custom_prng": False,
    "jax_enable_x64": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_legacy_prng_key": "allow",
    "jax_log_compiles": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": True,
    "jax_use_shardy_partitioner": True,
}
"""Options that are sent to hosts, with the defaults of JAX 0.10. If the caller's version of JAX has
another default, the option is sent although the caller did not set it. That does no harm, because
hosts have the same version of JAX, and so the same default."""


def changed_options(*, without: Mapping[str, str]) -> dict[str, Value]:
    """Return the options in `DEFAULTS` that have another value in this process.

    Args:
        without: variables of the job, such as `JAX_ENABLE_X64`; options that these set are left
            out.
    """
    values = getattr(getattr(sys.modules.get("jax"), "config", None), "values", None)
    if not isinstance(values, dict):
        return {}
    # Send the value of an enumeration's member, since JAX accepts the value too.
    current = {n: getattr(values[n], "value", values[n]) for n in DEFAULTS if n in values}
    return {
        name: value
        for name, value in current.items()
        if value != DEFAULTS[name] and name.upper() not in without
    }
