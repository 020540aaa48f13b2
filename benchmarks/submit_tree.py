"""Time to send a source tree, compared with `tar` of the same tree in the same run.

In: nothing (or the number of files and their size). Out: a table on stdout.

    python benchmarks/submit_tree.py [FILES] [FILE_KB]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kinetic._source import bundle
from kinetic._source.download import unpack
from kinetic._source.upload import Sent, upload
from kinetic._store.local import LocalStore

ROUNDS = 7


def plant(root: Path, files: int, file_kb: int) -> None:
    for number in range(files):
        path = root / f"package{number // 200}" / f"part{number // 20}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(file_kb * 1000))
    (root / "pyproject.toml").write_text("")
    (root / ".gitignore").write_text("*.pyc\nbuild/\n*.ckpt\n/data/**/*.csv\n!keep.csv\n")


def best_ms(act: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def best_in_turns_ms(*acts: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Return the best times, measured in turns, so that pending disk writes slow down all calls
    equally."""
    taken = [[best_ms(act, 1) for act in acts] for _ in range(rounds)]
    return [min(column) for column in zip(*taken, strict=True)]


def main(files: int = 2000, file_kb: int = 50) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        root, store, dest = place / "root", LocalStore(place / "store"), iter(range(1000))
        plant(root, files, file_kb)

        def build() -> bundle.Bundle:
            return bundle.build(root, cache_dir=place / "cache")

        def send() -> Sent:
            return upload(build(), store)

        def on_the_wire(sent: Sent) -> int:
            """Return the number of bytes sent: files, and the lists that name them."""
            return sent.size_bytes + sent.lists_bytes

        def change(number: int) -> None:
            (root / "package0/part0/module0.py").write_bytes(str(number).encode() * 100)

        def tar() -> None:
            subprocess.run(["tar", "cf", place / "tree.tar", "-C", root, "."], check=True)

        def untar() -> None:
            target = place / f"untar{next(dest)}"
            target.mkdir()
            subprocess.run(["tar", "xf", place / "tree.tar", "-C", target], check=True)

        tar()  # Load the files into the page cache.
        rows = [("first submission: walk, hash", best_ms(build, 1), None)]
        began = time.perf_counter()
        first = send()
        rows += [
            ("first submission: send", 1000 * (time.perf_counter() - began), on_the_wire(first))
        ]
        time.sleep(2.1)  # Until the files' stamps are trusted.
        build()
        unchanged_ms, tar_ms = best_in_turns_ms(send, tar)
        rows += [("unchanged", unchanged_ms, on_the_wire(send()))]
        changed_ms, changed_bytes = [], 0
        for number in range(ROUNDS):
            change(number)
            began = time.perf_counter()
            sent = send()
            changed_ms.append(1000 * (time.perf_counter() - began))
            changed_bytes = on_the_wire(sent)
            tar_ms = min(tar_ms, best_ms(tar, 1))
        rows += [("one file changed", min(changed_ms), changed_bytes)]
        rows.insert(0, ("tar cf (the floor), in turns", tar_ms, None))
        made = build()
        unpack_ms, untar_ms = best_in_turns_ms(
            lambda: unpack(store, made.tree, place / f"dest{next(dest)}"), untar
        )
        rows += [("unpack on a host", unpack_ms, None), ("tar xf", untar_ms, None)]

        print(
            f"{files:,} files, {files * file_kb / 1000:,.0f} MB\n\n"
            f"{'':32}{'ms':>10}{'x tar cf':>10}{'bytes sent':>14}"
        )
        for name, took_ms, wire in rows:
            print(
                f"{name:32}{took_ms:10.1f}{took_ms / tar_ms:10.2f}"
                f"{'' if wire is None else f'{wire:,}':>14}"
            )
        print(f"unpack: {unpack_ms / untar_ms:.2f}x tar xf, measured in turns   goal <= 1x")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
