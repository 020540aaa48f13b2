"""Options of JAX that the caller has set and that change results, to be set on the hosts as well.

In: JAX, if this process has imported it. Out: names and values that differ from JAX's defaults.

`jax.config.update("jax_enable_x64", True)` at the top of a script is not part of a function:
without this, the function would compute in float32 on the hosts. Other options, such as where JAX
runs and what it logs, are left to the host.
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
"""The options that travel, with the defaults of JAX 0.10. Where another version has another
default, the option travels although nobody set it, and the hosts, with the same version, already
have its value."""


def changed_options(*, without: Mapping[str, str]) -> dict[str, Value]:
    """Return the options in `DEFAULTS` that have another value in this process.

    Args:
        without: variables of the job; an option that one of them sets (`JAX_ENABLE_X64`) is left
            out.
    """
    values = getattr(getattr(sys.modules.get("jax"), "config", None), "values", None)
    if not isinstance(values, dict):
        return {}
    # JAX accepts the value of an enumeration, too.
    current = {n: getattr(values[n], "value", values[n]) for n in DEFAULTS if n in values}
    return {
        name: value
        for name, value in current.items()
        if value != DEFAULTS[name] and name.upper() not in without
    }
