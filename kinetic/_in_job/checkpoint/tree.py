"""The state of a training, leaf by leaf: what its parts are called, and which part of each array
this process has.

In: a pytree. Out: `Leaf`s, `ArrayPart`s; a pytree from them.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kinetic._core.values import dataclass
from kinetic.errors import CheckpointError, CheckpointMismatch, a_type, name_some

_PLAIN = (bool, int, float)
_NO_NUMBERS = "OSUMm"
"""Kinds of numpy's types that cannot be saved: objects, text, times."""
_NAMED = 3
_WEAK, _SCALAR = "weak", "scalar"


@dataclass(frozen=True)
class Leaf:
    """What is known of a leaf on all hosts.

    Attributes:
        name: its path in the pytree, for example "['params']['w']".
        shape: of the whole array; () for what is no array.
        dtype: numpy's name of its type; "" for a plain value.
        key: how random numbers are made of it, for a typed key of JAX; else "".
        value: of a leaf that is no array.
        kind: "weak" for a weakly typed array of JAX, as `jnp.asarray(0.1)`; "scalar" for a number
            of numpy; "" for other arrays; None where it is not known.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    key: str = ""
    value: bool | int | float | None = None
    kind: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether this is an array without content, as one of shape (0, 3)."""
        return 0 in self.shape

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, without what is not given."""
        if not self.dtype:
            return {"name": self.name, "value": self.value}
        named = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        return named | ({"key": self.key} if self.key else {}) | {"kind": self.kind}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Leaf:
        """Rebuild from `to_json`."""
        return cls(
            data["name"],
            tuple(data.get("shape", ())),
            data.get("dtype", ""),
            data.get("key", ""),
            data.get("value"),
            data.get("kind"),
        )


@dataclass(frozen=True)
class ArrayPart:
    """A box of an array, and where its content is."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: Any


class TreeState(NamedTuple):
    """A pytree, taken apart.

    Attributes:
        leaves: what is known of them on all hosts.
        values: what is behind them; typed keys as plain arrays, and arrays that each host has for
            itself as arrays of numpy; or descriptions of the arrays.
        structure: as JAX knows it.
        placed: on which devices of this host the latter lie, by their numbers; None for arrays
            that JAX moves to where they are needed ("uncommitted"), as `jnp.zeros(3)` makes them.
        joined: what Orbax calls the leaves.
        described: the arrays whose descriptions are among the values.
    """

    leaves: list[Leaf]
    values: list[Any]
    structure: Any
    placed: dict[int, Any]
    joined: list[str]
    described: Sequence[Any] = ()

    def is_abstract(self) -> bool:
        """Whether arrays are described that do not exist."""
        return len(self.described) < sum(hasattr(value, "sharding") for value in self.values)

    def make_room(self) -> None:
        """Free the arrays that are described here where a device has no room for as many again."""
        arrays = [array for array in self.described if not array.is_deleted()]
        sizes: collections.Counter[Any] = collections.Counter()
        for shard in (shard for array in arrays for shard in array.addressable_shards):
            sizes[shard.device] += shard.data.nbytes
        if any(_free_bytes(device) < 2 * size for device, size in sizes.items()):
            for array in arrays:
                array.delete()

    def look_alike(self) -> list[str]:
        """Return the names of leaves that Orbax would write to one place: those of "a.b" and of
        "b" below "a"."""
        counts = collections.Counter(self.joined)
        return [
            leaf.name
            for leaf, name in zip(self.leaves, self.joined, strict=True)
            if counts[name] > 1
        ]

    def plain(self) -> Any:
        """Return the same pytree, with plain arrays for typed keys; of one array alone a dict, as
        Orbax wants it. It saves no empty arrays and no empty states: a zero stands for each. Where
        leaves look alike to it, it is a dict of them by our names."""
        import jax
        import numpy as np

        files = self.in_files()
        if not files:
            return {"nothing": np.zeros((), np.int8)}
        if self.joined == [""] or self.look_alike():
            return files
        return jax.tree_util.tree_unflatten(self.structure, files.values())

    def in_files(self) -> dict[str, Any]:
        """Return the values that `plain` has, by what Orbax calls them."""
        import numpy as np

        names = [leaf.name for leaf in self.leaves] if self.look_alike() else self.joined
        values = [
            np.zeros((), np.int8) if leaf.is_empty else value
            for leaf, value in zip(self.leaves, self.values, strict=True)
        ]
        return dict(zip(["array"] if names == [""] else names, values, strict=True))

    def arrays(self) -> list[tuple[int, Any]]:
        """Return the leaves that are arrays, with their numbers."""
        return [
            (number, value)
            for number, (leaf, value) in enumerate(zip(self.leaves, self.values, strict=True))
            if leaf.dtype
        ]

    def as_saved(self, leaves: Sequence[Leaf]) -> TreeState:
        """Return this state with the kind that was saved where one is a number and the other an
        array of shape (), or a number of another kind: a number of the first state is an array
        after a compiled step, and JAX computes with that in another precision. It does so with
        weakly typed arrays, too."""
        import numpy as np

        saved = {leaf.name: leaf for leaf in leaves}
        laid_out = self._replace(
            leaves=[*self.leaves], values=[*self.values], placed={**self.placed}
        )
        for number, leaf in enumerate(self.leaves):
            was = saved.get(leaf.name, leaf)
            if bool(was.dtype) != bool(leaf.dtype) or type(was.value) is not type(leaf.value):
                laid_out.leaves[number] = was
                laid_out.values[number] = np.zeros((), was.dtype) if was.dtype else was.value
                laid_out.placed.pop(number, None)
            elif was.kind is not None and was.dtype == leaf.dtype:
                laid_out.leaves[number] = replace(leaf, kind=was.kind)
        return laid_out

    def with_values(self, value_of: Callable[[int], Any]) -> Any:
        """Return a pytree of this structure.

        Args:
            value_of: the new content of a leaf that is not empty, from its number.
        """
        import jax
        import jax.numpy as jnp
        import numpy as np

        values = []
        for number, leaf in enumerate(self.leaves):
            like = self.values[number]
            where = getattr(like, "sharding", None)
            if not leaf.is_empty:
                new = value_of(number)
            elif where is None:
                new = np.zeros(like.shape, like.dtype)
            else:
                new = jnp.zeros(like.shape, like.dtype, device=where)
            if isinstance(new, np.ndarray) and isinstance(like, np.ndarray):
                new = new.astype(like.dtype, copy=False)  # whose bytes may be in another order
            if number in self.placed:
                where = self.placed[number]
                new = jnp.asarray(np.asarray(new)) if where is None else jax.device_put(new, where)
            if leaf.kind == _WEAK:
                new = _make_weak(new)
            elif leaf.kind == _SCALAR and isinstance(new, np.ndarray):
                new = new[()]
            values.append(jax.random.wrap_key_data(new, impl=leaf.key) if leaf.key else new)
        return jax.tree_util.tree_unflatten(self.structure, values)


def take_apart(state: Any, *, describes: bool = False) -> TreeState:
    """Take a pytree apart.

    Args:
        state: the pytree.
        describes: also take `jax.ShapeDtypeStruct`s, which stand for arrays; and put one in the
            place of each array, so that these can be freed.

    Raises:
        CheckpointError: a leaf is neither an array nor a number, or has the name of another one.
    """
    import jax
    import numpy as np

    with_paths, structure = jax.tree_util.tree_flatten_with_path(state)
    pairs = [_leaf(jax.tree_util.keystr(path), value, describes) for path, value in with_paths]
    leaves, values = [leaf for leaf, _ in pairs], [behind for _, behind in pairs]
    names = collections.Counter(leaf.name for leaf in leaves)
    if twice := [name for name, count in names.items() if count > 1]:
        raise CheckpointError(
            f"The state has two leaves of the name {twice[0]}, so a checkpoint cannot tell them "
            "apart: let the node of the pytree that they belong to give each a key of its own."
        )
    placed = {
        n: None if _is_movable(value) else value.sharding
        for n, value in enumerate(values)
        if _is_own(value) or _is_movable(value)
    }
    joined = [join_keys(path) for path, _ in with_paths]
    if not describes:
        values = [np.asarray(value) if _is_own(value) else value for value in values]
        return TreeState(leaves, values, structure, placed, joined)
    arrays = [value for value in values if isinstance(value, jax.Array)]
    for n in (n for n, value in enumerate(values) if hasattr(value, "sharding")):
        where = None if n in placed else values[n].sharding
        values[n] = jax.ShapeDtypeStruct(values[n].shape, values[n].dtype, sharding=where)
    return TreeState(leaves, values, structure, placed, joined, arrays)


def _free_bytes(device: Any) -> float:
    """How much memory a device has left; infinite where it does not tell, as processors."""
    with contextlib.suppress(Exception):  # some proxies of devices raise
        about = device.memory_stats()
        return float(about["bytes_limit"] - about["bytes_in_use"])
    return math.inf


def _make_weak(value: Any) -> Any:
    """The same array, weakly typed, on the same devices."""
    import jax

    make = jax.lax.convert_element_type_p.bind
    weak = make(value, new_dtype=value.dtype, weak_type=True, sharding=None)
    return jax.device_put(weak, value.sharding) if getattr(value, "committed", False) else weak


def join_keys(path: Iterable[Any]) -> str:
    """Return what Orbax calls the leaf at a path: its keys, joined by dots."""
    return ".".join(_key(key) for key in path)


def _key(key: Any) -> str:
    """What Orbax calls a key of a path."""
    for name in ("key", "idx", "name"):  # of a dict, a sequence, an object
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _is_own(value: Any) -> bool:
    """Whether each of several processes has this array for itself, as `jnp.zeros(3)` makes it."""
    import jax

    where = getattr(value, "sharding", None)
    return where is not None and where.is_fully_addressable and jax.process_count() > 1


def _is_movable(value: Any) -> bool:
    """Whether this array may be in a computation with arrays on other devices."""
    import jax

    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is None
    return isinstance(value, jax.Array) and not value.committed and jax.device_count() > 1


def is_key(value: Any) -> bool:
    """Whether this is a typed key of JAX, or describes one."""
    import jax

    return bool(jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key))


def _impl_of(key: Any) -> str:
    import jax

    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return str(impls[0])


def _leaf(name: str, value: Any, describes: bool) -> tuple[Leaf, Any]:
    import jax
    import numpy as np

    is_taken = describes and isinstance(value, jax.ShapeDtypeStruct)
    if is_key(value) and (is_taken or isinstance(value, jax.Array)):
        if is_taken:
            data = jax.eval_shape(jax.random.key_data, value)
            data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=value.sharding)
        else:
            data = jax.random.key_data(value)
        return Leaf(name, tuple(data.shape), data.dtype.name, _impl_of(value), kind=""), data
    if is_taken or isinstance(value, jax.Array | np.ndarray | np.generic):
        is_record = value.dtype.type is np.void
        if value.dtype.kind in _NO_NUMBERS or is_record:
            what = "Python objects" if value.dtype == object else value.dtype.name
            what = "records" if is_record else what
            raise CheckpointError(
                f"The state's leaf {name} is an array of {what}: make it one of numbers."
            )
        kind = _WEAK if getattr(value, "weak_type", False) else ""
        array = value
        if isinstance(value, np.generic):
            kind, array = _SCALAR, np.asarray(value)
        return Leaf(name, tuple(array.shape), array.dtype.name, kind=kind), array
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise CheckpointError(
            f"The state's leaf {name} is an int of {value.bit_length()} bits, and Orbax saves "
            "those of 64. Keep it as an array of smaller ones."
        )
    if isinstance(value, _PLAIN):
        return Leaf(name, value=value), value
    raise CheckpointError(
        f"The state's leaf {name} is {a_type(value)}: a checkpoint holds arrays and numbers. "
        "Leave it out of the state, and put it back after restore()."
    )


def parts_here(value: Any) -> list[ArrayPart]:
    """Return the parts of an array that this process has, each once; their data are arrays of
    devices or of numpy, not copied."""
    shards = getattr(value, "addressable_shards", None)
    if shards is None:
        import numpy as np

        array = np.asarray(value)
        return [ArrayPart((0,) * array.ndim, tuple(array.shape), array)]
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], ArrayPart] = {}
    for shard in shards:
        start, shape = box(shard.index, value.shape)
        parts.setdefault((start, shape), ArrayPart(start, shape, shard.data))
    return list(parts.values())


def boxes_of(value: Any) -> dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the boxes of an array that each process needs, by its index; -1 stands for every
    process, which needs all of an array that lies on no devices."""
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        return {-1: {((0,) * len(value.shape), tuple(value.shape))}}
    needed: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for device, index in sharding.devices_indices_map(tuple(value.shape)).items():
        needed.setdefault(device.process_index, set()).add(box(index, value.shape))
    return needed


def box(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where a box begins, and its shape."""
    spans = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    return tuple(a for a, _ in spans), tuple(b - a for a, b in spans)


def check_same(
    saved: Sequence[Leaf], now: Sequence[Leaf], where: str, *, cast: bool = False
) -> None:
    """Check that what was saved fits into the state of today; a number fits an array of shape ().

    Args:
        saved: the leaves of then.
        now: those of today.
        where: what was saved, for the message.
        cast: whether numbers may be lost by a cast.

    Raises:
        CheckpointMismatch: it does not; the message names the leaves.
    """
    old, new = {leaf.name: leaf for leaf in saved}, {leaf.name: leaf for leaf in now}
    faults = []
    if missing := [name for name in old if name not in new]:
        faults.append(f"the state of restore() has no {name_some(missing, _NAMED)}")
    if added := [name for name in new if name not in old]:
        faults.append(f"the checkpoint has no {name_some(added, _NAMED)}")
    pairs = [(old[name], leaf) for name, leaf in new.items() if name in old]
    faults += _join_first(
        f"{leaf.name} was {_shape(was)} and is {_shape(leaf)}"
        for was, leaf in pairs
        if (was.key, was.shape) != (leaf.key, leaf.shape)
    )
    loses = [
        (was, leaf)
        for was, leaf in ([] if cast else pairs)
        if was.dtype and leaf.dtype and can_lose(was.dtype, leaf.dtype)
    ]
    faults += _join_first(f"{leaf.name} was {was.dtype} and is {leaf.dtype}" for was, leaf in loses)
    if faults:
        types = ", shapes and types" if loses else " and shapes"
        allow = "; cast=True allows a cast that can lose" if loses else ""
        raise CheckpointMismatch(
            f"The checkpoint {where} does not fit: {'; '.join(faults)}. Give restore() a state of "
            f"the same structure{types}{allow}, or choose another folder for a new training."
        )


def _join_first(faults: Iterable[str]) -> list[str]:
    """The first of them, and how many there are more, as one fault or none."""
    names = [*faults]
    return [name_some(names, _NAMED, "; ")] if names else []


def _shape(leaf: Leaf) -> str:
    if leaf.key:
        return f"a key of {leaf.key}"
    if not leaf.dtype:
        return "a number"
    return f"{leaf.shape}" if leaf.shape else "an array of shape ()"


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
