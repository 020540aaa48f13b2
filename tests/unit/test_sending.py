"""The progress line that is shown during a large upload."""

from __future__ import annotations

import io

import pytest
from doubles.memory_store import MemoryStore

from kinetic._client.board import sending
from kinetic._store.local import LocalStore

MB = 1_000_000


class Terminal(io.StringIO):
    def isatty(self):
        return True


class CountingStore(MemoryStore):
    def with_progress(self, on_sent):
        self.on_sent = on_sent
        return self


def test_a_line_grows_and_goes_away():
    terminal, store = Terminal(), CountingStore()
    with sending.show_progress(store, 40 * MB, terminal) as watched:
        assert watched is store
        store.on_sent(20 * MB)
        store.on_sent(10 * MB)
    lines = terminal.getvalue().split("\r")
    assert "[############............] 20 of at most 40 MB" in lines[1]
    assert "30 of at most 40 MB" in lines[2]
    assert lines[3].isspace()
    assert lines[-1] == ""


def test_a_large_object_is_shown_while_it_is_sent(tmp_path, monkeypatch):
    pytest.importorskip("google.cloud.storage")
    from doubles.gcs import serving

    from kinetic._store.gcs import GcsStore

    terminal, shown_before_the_end = Terminal(), []
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        double.before = lambda call, _: (
            shown_before_the_end.append(terminal.getvalue()) if call == "chunk" else None
        )
        # The connection breaks in the second part. Half of the part is sent twice, but counted
        # once.
        double.fail("chunk", cut_after=8 * MB)
        with sending.show_progress(GcsStore("gs://bucket"), 60 * MB, terminal) as watched:
            assert watched.put("a", iter([b"x" * MB] * 50))
            assert watched.put("b", b"x" * MB)
        assert double.content("bucket", "a") == b"x" * 50 * MB
    assert "16 of at most 60 MB" in shown_before_the_end[0]
    assert "50 of at most 60 MB" not in shown_before_the_end[0]
    assert "51 of at most 60 MB" in terminal.getvalue()
    assert " 52 of" not in terminal.getvalue()


def test_no_progress_is_shown_for_small_or_local_uploads_or_in_a_pipe(tmp_path):
    for where, most, stream in (
        (CountingStore(), 5 * MB, Terminal()),
        (LocalStore(tmp_path), 40 * MB, Terminal()),
        (CountingStore(), 40 * MB, io.StringIO()),
    ):
        with sending.show_progress(where, most, stream) as same:
            assert same is where
            same.put("a", b"x")
        assert stream.getvalue() == ""
