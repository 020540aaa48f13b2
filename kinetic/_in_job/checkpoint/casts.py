"""Which types of numbers hold all numbers of another type. Pure.

In: the names of two types, as numpy and ml_dtypes have them. Out: whether a cast can lose.
"""

from __future__ import annotations

from typing import Any


def can_lose(saved: str, now: str) -> bool:
    """Whether there are numbers of the one type that the other one has not."""
    import jax.numpy as jnp
    import numpy as np

    one, other = np.dtype(saved), np.dtype(now)
    if one == other or one == np.dtype(bool):
        return False
    if other == np.dtype(bool) or (_is(one, jnp.complexfloating) > _is(other, jnp.complexfloating)):
        return True
    one, other = _real_type_of(one), _real_type_of(other)
    if _is(one, jnp.integer):
        least, most = int(jnp.iinfo(one).min), int(jnp.iinfo(one).max)
        if _is(other, jnp.integer):
            return least < int(jnp.iinfo(other).min) or most > int(jnp.iinfo(other).max)
        return most.bit_length() > jnp.finfo(other).nmant + 1 or most > float(jnp.finfo(other).max)
    if _is(other, jnp.integer):
        return True
    a, b = jnp.finfo(one), jnp.finfo(other)
    return bool(
        a.nmant > b.nmant
        or float(a.max) > float(b.max)
        or float(a.smallest_subnormal) < float(b.smallest_subnormal)
    )


def _is(dtype: Any, kind: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(dtype, kind))


def _real_type_of(dtype: Any) -> Any:
    """The type of a complex number's parts."""
    import numpy as np

    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
