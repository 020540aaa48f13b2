"""What the files of a checkpoint tell: which program has written it, and how to read it. Pure.

In: names of files. Out: `Layout`, lines of Python.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from kinetic._core.values import dataclass

RECORD_ITEM, STATE_ITEM = "kinetic", "state"
"""Items of kinetic's own checkpoints."""
ORBAX, FLAX, ANOTHER = "Orbax", "flax.training.checkpoints", "another program"
UNFINISHED = ".orbax-checkpoint-tmp"
_TREE_FILES = ("_METADATA", "manifest.ocdbt")
"""Orbax writes one of them, at least, into the folder of a pytree."""
_ABOUT = "_CHECKPOINT_METADATA"
_OF_A_PROCESS = "ocdbt.process_"
_NUMBERED = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.-]*[_-])?(\d+)", re.ASCII)
_OF_FLAX = re.compile(r"checkpoint_\d+", re.ASCII)

_TORCH = ("import torch", 'found = torch.load({path!r}, map_location="cpu")')
_OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    ".distcp": (
        "torch.distributed.checkpoint",
        (
            "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
            'dcp_to_torch_save({folder!r}, "/tmp/state.pt")',
            'found = __import__("torch").load("/tmp/state.pt", map_location="cpu")',
        ),
    ),
    ".safetensors": (
        "safetensors",
        ("from safetensors.numpy import load_file", "found = load_file({path!r})"),
    ),
    ".keras": (
        "Keras",
        ("import keras", "model = keras.models.load_model({path!r})", "model.weights"),
    ),
    ".weights.h5": ("Keras", ("# model: as it was built", "model.load_weights({path!r})")),
    ".index": (
        "TensorFlow",
        ("import tensorflow as tf", "found = tf.train.load_checkpoint({stem!r})"),
    ),
    ".eqx": (
        "Equinox",
        (
            "import equinox",
            "# model: as it was built",
            "found = equinox.tree_deserialise_leaves({path!r}, model)",
        ),
    ),
    ".pt": ("PyTorch", _TORCH),
    ".pth": ("PyTorch", _TORCH),
    ".ckpt": ("PyTorch", _TORCH),
    "pytorch_model.bin": ("PyTorch", _TORCH),
}
"""What files of other programs end with, and what reads them."""


@dataclass(frozen=True)
class Layout:
    """What lies in the folder of a checkpoint.

    Attributes:
        program: that has written it; "" for kinetic.
        trees: the items that are pytrees; "" stands for the folder itself.
        others: the other items: iterators, documents, metrics.
    """

    program: str
    trees: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def item(self) -> str | None:
        """The only pytree, which must be the state; None where there are several, or none."""
        if not self.program:
            return STATE_ITEM
        return self.trees[0] if len(self.trees) == 1 else None


def layout_of(name: str, files: Collection[str]) -> Layout:
    """Return what the files of a checkpoint tell.

    Args:
        name: of the folder of the checkpoint.
        files: below it.
    """
    tops = sorted({top for top, below, _ in (each.partition("/") for each in files) if below})
    if RECORD_ITEM in tops:
        return Layout("", (STATE_ITEM,), tuple(each for each in tops if each != STATE_ITEM))
    if any(each in files for each in _TREE_FILES):
        return Layout(FLAX if _OF_FLAX.fullmatch(name) else ORBAX, ("",))
    trees = [top for top in tops if any(f"{top}/{each}" in files for each in _TREE_FILES)]
    others = [top for top in tops if top not in trees]
    return Layout(ORBAX if trees or _ABOUT in files else ANOTHER, tuple(trees), tuple(others))


def is_one(files: Collection[str], *, has_steps: bool) -> bool:
    """Whether these are the files of one checkpoint; `has_steps`: whether names among them are
    those of steps."""
    if any(each in files for each in (*_TREE_FILES, _ABOUT)):
        return True
    whole = layout_of("", files)
    return not has_steps and (bool(whole.trees) or not whole.program)


def is_message(name: str, content: bytes) -> bool:
    """Whether a file is a checkpoint as flax.training writes it without Orbax: a map in the format
    of MessagePack."""
    first = content[:1]
    is_map = b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")
    return is_map and _OF_FLAX.fullmatch(name) is not None


def number_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder: 100, model_00000100 and checkpoint_100 are 100;
    None for other names."""
    if name.startswith(_OF_A_PROCESS):  # a part of a pytree
        return None
    matched = _NUMBERED.fullmatch(name.partition(UNFINISHED)[0])
    return None if matched is None else int(matched[1])


def lines_for(path: str, layout: Layout, *, is_message: bool = False) -> list[str]:
    """Return the lines of Python that read a checkpoint.

    Args:
        path: of it.
        layout: of it.
        is_message: whether it is a file of flax.training.
    """
    if is_message:
        return [
            "import flax, pathlib",
            f"content = pathlib.Path({path!r}).read_bytes()",
            "found = flax.serialization.msgpack_restore(content)",
        ]
    names = layout.trees or layout.others or ("",)
    where = f"{path}/{names[0]}".rstrip("/")
    return [
        "import jax, numpy, orbax.checkpoint as ocp",
        f"path, reader = {where!r}, ocp.PyTreeCheckpointer()"
        + (f"  # or {', '.join(names[1:])}" if names[1:] else ""),
        "found = reader.restore(path, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs("
        "restore_type=numpy.ndarray), reader.metadata(path).item_metadata.tree))",
    ]


def other_program(where: str, files: Collection[str]) -> tuple[str, list[str]] | None:
    """Return which program's checkpoints lie in a folder that none of kinetic's and Orbax's are in,
    and the lines that read the last one; None where none is known."""
    for ending, (program, lines) in _OTHERS.items():
        found = [each for each in files if each.endswith(ending) and each.count("/") < 2]
        if ending == ".index" and not any(".data-00000-of-" in each for each in files):
            continue
        if found:
            path = f"{where}/{max(found)}"
            given = {"path": path, "folder": path.rpartition("/")[0], "stem": path[: -len(ending)]}
            return program, [line.format(**given) for line in lines]
    return None
