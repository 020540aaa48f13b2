"""The state of a training run by leaf: names, types, and this process's parts of each array."""

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
_UNSAVABLE_KINDS = "OSUMm"
"""Kinds of NumPy types that cannot be saved: objects, text, times."""
_MOST_NAMED = 3
_WEAK, _SCALAR = "weak", "scalar"


@dataclass(frozen=True)
class Leaf:
    """Description of an array or other value in the pytree, the same on all hosts.

    Attributes:
        name: Path in the pytree, for example "['params']['w']".
        shape: Shape of the whole array; () for a value that is not an array.
        dtype: NumPy's name of the type; "" for a plain value.
        key: Implementation of a typed JAX key, such as "threefry2x32"; else "".
        value: Value of a leaf that is not an array.
        kind: "weak" for a weakly typed JAX array such as `jnp.asarray(0.1)`; "scalar" for a NumPy
            number; "" for other arrays; None if not recorded.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    key: str = ""
    value: bool | int | float | None = None
    kind: str | None = None

    @property
    def is_empty(self) -> bool:
        """True for an array without content, such as one of shape (0, 3)."""
        return 0 in self.shape

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, without fields that do not apply."""
        if not self.dtype:
            return {"name": self.name, "value": self.value}
        named = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        return named | ({"key": self.key} if self.key else {}) | {"kind": self.kind}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Leaf:
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
    """A box of an array, and its content."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: Any


class TreeState(NamedTuple):
    """A pytree, taken apart.

    Attributes:
        leaves: Descriptions of the leaves, the same on all hosts.
        values: Their values, or descriptions of them. Typed keys are plain arrays, and
            process-local arrays are NumPy arrays.
        structure: JAX's structure of the pytree.
        placed: Shardings of process-local arrays, by number of the leaf; None for arrays that JAX
            may move ("uncommitted"), such as `jnp.zeros(3)`.
        joined: Orbax's names of the leaves.
        described: The arrays that `values` has only as descriptions.
    """

    leaves: list[Leaf]
    values: list[Any]
    structure: Any
    placed: dict[int, Any]
    joined: list[str]
    described: Sequence[Any] = ()

    def is_abstract(self) -> bool:
        """True if the user gave descriptions (`jax.ShapeDtypeStruct`) in place of arrays."""
        return len(self.described) < sum(hasattr(value, "sharding") for value in self.values)

    def make_room(self) -> None:
        """Free the described arrays if a device lacks the memory to restore them as new arrays."""
        arrays = [array for array in self.described if not array.is_deleted()]
        sizes: collections.Counter[Any] = collections.Counter()
        for shard in (shard for array in arrays for shard in array.addressable_shards):
            sizes[shard.device] += shard.data.nbytes
        if any(_read_free_bytes(device) < 2 * size for device, size in sizes.items()):
            for array in arrays:
                array.delete()

    def list_clashing(self) -> list[str]:
        """Return the names of leaves that have the same name in Orbax, such as key "a.b", and key
        "b" in a dict "a"."""
        counts = collections.Counter(self.joined)
        return [
            leaf.name
            for leaf, name in zip(self.leaves, self.joined, strict=True)
            if counts[name] > 1
        ]

    def plain(self) -> Any:
        """Return the pytree as Orbax saves it.

        Orbax cannot save everything: typed keys become plain arrays, an empty array or state
        becomes a zero, and a single array becomes a dict. So does a pytree in which Orbax would
        give two leaves one name.
        """
        import jax
        import numpy as np

        files = self.in_files()
        if not files:
            return {"nothing": np.zeros((), np.int8)}
        if self.joined == [""] or self.list_clashing():
            return files
        return jax.tree_util.tree_unflatten(self.structure, files.values())

    def in_files(self) -> dict[str, Any]:
        """Return the values of the leaves of `plain`, by Orbax's names."""
        import numpy as np

        names = [leaf.name for leaf in self.leaves] if self.list_clashing() else self.joined
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
        """Return this state, with each scalar of the kind that was saved.

        A Python number in the initial state is an array of shape () after a compiled step. JAX
        computes with these in different precisions, as it does with weakly typed arrays.
        """
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
        """Return a pytree of this structure with new values.

        Args:
            value_of: Returns the value of a leaf that is not empty, by its number.
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
                new = new.astype(like.dtype, copy=False)  # It may have another byte order.
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
        state: The pytree.
        describes: Accept `jax.ShapeDtypeStruct`s in place of arrays, and replace all arrays by
            descriptions, so that they can be freed.

    Raises:
        CheckpointError: A leaf is neither an array nor a number, or two leaves have the same name.
    """
    import jax
    import numpy as np

    with_paths, structure = jax.tree_util.tree_flatten_with_path(state)
    pairs = [
        _describe_leaf(jax.tree_util.keystr(path), value, describes) for path, value in with_paths
    ]
    leaves, values = [leaf for leaf, _ in pairs], [value for _, value in pairs]
    names = collections.Counter(leaf.name for leaf in leaves)
    if duplicates := [name for name, count in names.items() if count > 1]:
        raise CheckpointError(
            f"The state has two leaves with the name {duplicates[0]}, so a checkpoint cannot tell "
            "them apart. Let the pytree node that they belong to give each its own key."
        )
    placed = {
        n: None if _is_movable(value) else value.sharding
        for n, value in enumerate(values)
        if _is_process_local(value) or _is_movable(value)
    }
    joined = [join_keys(path) for path, _ in with_paths]
    if not describes:
        values = [np.asarray(value) if _is_process_local(value) else value for value in values]
        return TreeState(leaves, values, structure, placed, joined)
    arrays = [value for value in values if isinstance(value, jax.Array)]
    for n in (n for n, value in enumerate(values) if hasattr(value, "sharding")):
        where = None if n in placed else values[n].sharding
        values[n] = jax.ShapeDtypeStruct(values[n].shape, values[n].dtype, sharding=where)
    return TreeState(leaves, values, structure, placed, joined, arrays)


def _read_free_bytes(device: Any) -> float:
    """Return the free memory of a device in bytes; infinity if unknown, as for CPUs."""
    with contextlib.suppress(Exception):  # Some device proxies raise.
        about = device.memory_stats()
        return float(about["bytes_limit"] - about["bytes_in_use"])
    return math.inf


def _make_weak(value: Any) -> Any:
    """Return the array as a weakly typed one, on the same devices."""
    import jax

    make = jax.lax.convert_element_type_p.bind
    weak = make(value, new_dtype=value.dtype, weak_type=True, sharding=None)
    return jax.device_put(weak, value.sharding) if getattr(value, "committed", False) else weak


def join_keys(path: Iterable[Any]) -> str:
    """Return Orbax's name of the leaf at a path: its keys, joined by dots."""
    return ".".join(_name_key(key) for key in path)


def _name_key(key: Any) -> str:
    for name in ("key", "idx", "name"):  # of a dict, a sequence, an object
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _is_process_local(value: Any) -> bool:
    """True if each of several processes has its own copy of this array, such as `jnp.zeros(3)`."""
    import jax

    where = getattr(value, "sharding", None)
    return where is not None and where.is_fully_addressable and jax.process_count() > 1


def _is_movable(value: Any) -> bool:
    """True if JAX may move this array to the devices of other arrays in a computation."""
    import jax

    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is None
    return isinstance(value, jax.Array) and not value.committed and jax.device_count() > 1


def is_key(value: Any) -> bool:
    """True if this is a typed JAX key, or a description of one."""
    import jax

    return bool(jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key))


def _find_impl(key: Any) -> str:
    import jax

    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return str(impls[0])


def _describe_leaf(name: str, value: Any, describes: bool) -> tuple[Leaf, Any]:
    import jax
    import numpy as np

    is_described = describes and isinstance(value, jax.ShapeDtypeStruct)
    if is_key(value) and (is_described or isinstance(value, jax.Array)):
        if is_described:
            data = jax.eval_shape(jax.random.key_data, value)
            data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=value.sharding)
        else:
            data = jax.random.key_data(value)
        return Leaf(name, tuple(data.shape), data.dtype.name, _find_impl(value), kind=""), data
    if is_described or isinstance(value, jax.Array | np.ndarray | np.generic):
        is_record = value.dtype.type is np.void
        if value.dtype.kind in _UNSAVABLE_KINDS or is_record:
            content = "Python objects" if value.dtype == object else value.dtype.name
            content = "records" if is_record else content
            raise CheckpointError(
                f"The state's leaf {name} is an array of {content}: a checkpoint holds arrays of "
                "numbers."
            )
        kind = _WEAK if getattr(value, "weak_type", False) else ""
        array = value
        if isinstance(value, np.generic):
            kind, array = _SCALAR, np.asarray(value)
        return Leaf(name, tuple(array.shape), array.dtype.name, kind=kind), array
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise CheckpointError(
            f"The state's leaf {name} is an int of {value.bit_length()} bits; Orbax saves at most "
            "64. Store it as an array of smaller ints."
        )
    if isinstance(value, _PLAIN):
        return Leaf(name, value=value), value
    raise CheckpointError(
        f"The state's leaf {name} is {a_type(value)}: a checkpoint holds arrays and numbers. "
        "Leave it out of the state, and put it back after restore()."
    )


def list_parts(value: Any) -> list[ArrayPart]:
    """Return the distinct parts of an array that this process has, without copying them."""
    shards = getattr(value, "addressable_shards", None)
    if shards is None:
        import numpy as np

        array = np.asarray(value)
        return [ArrayPart((0,) * array.ndim, tuple(array.shape), array)]
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], ArrayPart] = {}
    for shard in shards:
        start, shape = make_box(shard.index, value.shape)
        parts.setdefault((start, shape), ArrayPart(start, shape, shard.data))
    return list(parts.values())


def list_boxes(value: Any) -> dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the boxes of an array that each process needs, by process. For an array on no device,
    key -1 stands for all processes."""
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        return {-1: {((0,) * len(value.shape), tuple(value.shape))}}
    needed: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for device, index in sharding.devices_indices_map(tuple(value.shape)).items():
        needed.setdefault(device.process_index, set()).add(make_box(index, value.shape))
    return needed


def make_box(
    index: Sequence[slice], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the start and shape of a box."""
    spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(a for a, _ in spans), tuple(b - a for a, b in spans)


def check_same(
    saved: Sequence[Leaf],
    now: Sequence[Leaf],
    where: str,
    *,
    cast: bool = False,
    is_stored: bool = True,
) -> None:
    """Check that the saved leaves fit the current ones; a number fits an array of shape ().

    Args:
        saved: Leaves of the checkpoint.
        now: Leaves of the current state.
        where: Description of the checkpoint, for the message.
        cast: Allow casts that lose precision.
        is_stored: False if `saved` is the state that `save` was given, of no checkpoint yet.

    Raises:
        CheckpointMismatch: Leaves are missing or differ; the message names them.
    """
    old, new = {leaf.name: leaf for leaf in saved}, {leaf.name: leaf for leaf in now}
    faults, one = [], "the checkpoint" if is_stored else "the state of save()"
    if missing := [name for name in old if name not in new]:
        faults.append(f"the state of restore() has no {name_some(missing, _MOST_NAMED)}")
    if added := [name for name in new if name not in old]:
        faults.append(f"{one} has no {name_some(added, _MOST_NAMED)}")
    pairs = [(old[name], leaf) for name, leaf in new.items() if name in old]
    faults += _join_first(
        f"{leaf.name} is {_describe_shape(was)} in {one}, but {_describe_shape(leaf)} in the state "
        "of restore()"
        for was, leaf in pairs
        if (was.key, was.shape) != (leaf.key, leaf.shape)
    )
    loses = [
        (was, leaf)
        for was, leaf in ([] if cast else pairs)
        if was.dtype and leaf.dtype and can_lose(was.dtype, leaf.dtype)
    ]
    faults += _join_first(
        f"{leaf.name} is {was.dtype} in {one}, but {leaf.dtype} in the state of restore()"
        for was, leaf in loses
    )
    if faults:
        types = ", shapes and types" if loses else " and shapes"
        allow = "; cast=True allows a cast that loses precision" if loses else ""
        advice = f"Give restore() a state of the same structure{types}{allow}, or choose another "
        advice += "folder for a new training."
        if not is_stored:
            advice = f"Give both a state of the same structure{types}{allow}."
        raise CheckpointMismatch(
            f"{one.capitalize()} {where} does not fit the state of restore(): {'; '.join(faults)}. "
            f"{advice}"
        )


def _join_first(faults: Iterable[str]) -> list[str]:
    """Return the first faults and the number of the others as one text, in a list; or []."""
    names = [*faults]
    return [name_some(names, _MOST_NAMED, "; ")] if names else []


def _describe_shape(leaf: Leaf) -> str:
    if leaf.key:
        return f"a key of {leaf.key}"
    if not leaf.dtype:
        return "a number"
    return f"an array of shape {leaf.shape}"


def can_lose(saved: str, now: str) -> bool:
    """True if the type `saved` has numbers that the type `now` cannot represent."""
    import jax.numpy as jnp
    import numpy as np

    one, other = np.dtype(saved), np.dtype(now)
    if one == other or one == np.dtype(bool):
        return False
    if other == np.dtype(bool) or (_is(one, jnp.complexfloating) > _is(other, jnp.complexfloating)):
        return True
    one, other = _find_real_type(one), _find_real_type(other)
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


def _find_real_type(dtype: Any) -> Any:
    """Return the type of a complex number's parts."""
    import numpy as np

    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
