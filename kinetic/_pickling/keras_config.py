"""What the caller's program has set in Keras: a function builds its model on a host with it, too.

In: Keras, if this process has imported it. Out: what differs from Keras's defaults, set on a host.

`keras.mixed_precision.set_global_policy("mixed_bfloat16")` at the top of a script is not part of a
function: without this, the function would build a model of float32 on the hosts.
"""

from __future__ import annotations

import sys
from typing import Any

from kinetic._core.values import dataclass

_DEFAULTS = {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}
_STATE = "keras.src.backend.common.global_state"
"""Private to Keras, which has no other way to tell whether a policy or a seed was set."""


@dataclass(frozen=True)
class KerasState:
    """What the program has set.

    Attributes:
        config: values of `keras.config`, by name.
        policy: the dtype policy, as Keras serializes it; None for that of the default type.
        seed: of `keras.utils.set_random_seed`; None if it was not called.
    """

    config: dict[str, Any]
    policy: Any = None
    seed: int | None = None
    library = "keras"

    def apply(self) -> None:
        """Set it here, where Keras is imported."""
        keras: Any = sys.modules.get("keras")
        if keras is None:
            return
        for name, value in self.config.items():
            getattr(keras.config, f"set_{name}")(value)
        if self.policy is not None:
            keras.config.set_dtype_policy(keras.dtype_policies.get(self.policy))
        if self.seed is not None:
            random, numpy = sys.modules["random"], sys.modules["numpy"].random
            kept = random.getstate(), numpy.get_state()  # The function may have seeded them.
            keras.utils.set_random_seed(self.seed)
            random.setstate(kept[0])
            numpy.set_state(kept[1])


@dataclass(frozen=True)
class SeedState:
    """A seed of `keras.utils.set_random_seed` for another library's generator."""

    library: str
    seed: int

    def apply(self) -> None:
        """Seed it here."""
        sys.modules[self.library].seed(self.seed)


def read() -> list[KerasState | SeedState]:
    """Return what this thread has set in Keras."""
    keras: Any = sys.modules.get("keras")
    try:
        now = {name: getattr(keras.config, name)() for name in _DEFAULTS}
        find: Any = getattr(sys.modules[_STATE], "get_global_attribute", None)
        policy, seed = find("dtype_policy"), find("global_random_seed")
        if policy is not None:
            policy = (
                None if policy.name == now["floatx"] else keras.dtype_policies.serialize(policy)
            )
    except (AttributeError, KeyError, TypeError):  # Another version, or not imported.
        return []
    config = {name: value for name, value in now.items() if value != _DEFAULTS[name]}
    if not config and policy is None and seed is None:
        return []
    seeds = [] if seed is None else [SeedState(name, seed) for name in ("random", "numpy.random")]
    return [*seeds, KerasState(config, policy, seed)]
