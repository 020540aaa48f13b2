"""Source trees that tests build, send to a store and compare."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kinetic._core import layout
from kinetic._source import bundle, manifest, packs
from kinetic._source.upload import upload
from kinetic._store.local import LocalStore

FOREVER = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def later() -> int:
    """Return the time in ns plus 10 s, so that new files seem old enough to trust their mtimes."""
    return time.time_ns() + 10_000_000_000


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def build(root: Path, **given) -> bundle.Bundle:
    return bundle.build(root, **{"cache_dir": root.parent / "cache"} | given)


def listed(made: bundle.Bundle) -> list[str]:
    return sorted(entry.path for entry in manifest.decode(made.manifest))


def shape(root: Path) -> dict[str, tuple]:
    """Map each path to what a host must get: kind, permission bits, content or link target."""
    found: dict[str, tuple] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                what: tuple = ("link", os.readlink(path))
            elif stat.S_ISDIR(info.st_mode):
                what = ("folder", info.st_mode & 0o777)
            else:
                what = ("file", info.st_mode & 0o777, Path(path).read_bytes())
            found[os.path.relpath(path, root)] = what
    return found


def sent(root: Path, place: Path, **given) -> tuple[bundle.Bundle, LocalStore]:
    made, store = build(root, **given), LocalStore(place / "store")
    upload(made, store)
    return made, store


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6
).filter(
    lambda n: (
        n not in (".", "..", ".git", "__pycache__", ".gitignore", ".kineticignore", "pyvenv.cfg")
        and len(n.encode()) < 100
    )
)


TREES = st.recursive(
    st.tuples(st.binary(max_size=50), st.sampled_from([0o644, 0o755, 0o600, 0o444])),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
).filter(lambda tree: isinstance(tree, dict))


def plant(folder: Path, tree: dict) -> None:
    for name, what in tree.items():
        if isinstance(what, dict):
            (folder / name).mkdir()
            plant(folder / name, what)
        else:
            (folder / name).write_bytes(what[0])
            (folder / name).chmod(what[1])


def whole(store: LocalStore) -> None:
    """Assert that the store has all content named by its tree records: a submission that finds a
    record sends no content."""
    for key in store.list(layout.TREES):
        record = packs.TreeRecord.from_json(store.get(key))
        for name in record.packs:
            assert index_of(store.get(layout.pack(name))).name == name
        for digest in record.blobs:
            assert store.has(layout.blob(digest))


def index_of(pack: bytes) -> packs.Index:
    """Parse the index at the beginning of a stored pack (many small files in one object)."""
    return packs.parse(pack[: packs.index_bytes(pack[: packs.HEAD_BYTES])])
