"""What is shown while much is sent."""

from __future__ import annotations

import io

from kinetic._client.board import sending
from kinetic._store.local import LocalStore
from kinetic._store.memory import MemoryStore

MB = 1_000_000


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_grows_and_goes_away(tmp_path):
    terminal, store = Terminal(), MemoryStore()
    (tmp_path / "file").write_bytes(b"x" * 10 * MB)
    with sending.shown(store, 40 * MB, terminal) as watched:
        assert watched.put("a", b"x" * 20 * MB)
        assert watched.put("b", tmp_path / "file")
        assert watched.get("a") == store.get("a")
        assert watched.has("b")
    lines = terminal.getvalue().split("\r")
    assert "[############............] 20 of at most 40 MB" in lines[1]
    assert "30 of at most 40 MB" in lines[2]
    assert lines[-1] == ""


def test_nothing_is_shown_where_nobody_would_look(tmp_path):
    folder, store = LocalStore(tmp_path), MemoryStore()
    for where, most, stream in (
        (store, 5 * MB, Terminal()),
        (folder, 40 * MB, Terminal()),
        (store, 40 * MB, io.StringIO()),
    ):
        with sending.shown(where, most, stream) as same:
            assert same is where
            same.put("a", b"x")
        assert stream.getvalue() == ""
