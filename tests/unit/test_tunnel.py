"""Connections whose bytes lie in a store: what arrives, what is waited for, what is left.

In: two ends over one store. Out: bytes, errors, the keys that are left.
"""

from __future__ import annotations

import socket
import threading

import pytest
from doubles.memory_store import MemoryStore

from kinetic._store import tunnel
from kinetic._store.local import LocalStore
from kinetic._store.tunnel import CHUNK_BYTES, MOST_CHUNKS, Side, StoreConnection
from kinetic._system.connection import SocketConnection, pump


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(tunnel, "CLOSE_S", 0.3)


def connect(store, **limits):
    return [StoreConnection(store, "tunnel", side, **limits) for side in Side]


def close_all(*ends):
    threads = [threading.Thread(target=end.close) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_all(end):
    return b"".join(iter(end.read, b""))


def test_a_socket_and_a_tunnel_are_pumped_into_each_other_to_their_end(store):
    """As the port of a debugger is, on the host and here."""
    caller, host = connect(store)
    near, program = socket.socketpair()
    caller.write(b"hello")
    caller.finish()
    pump(host, port := SocketConnection(near))
    assert program.recv(100) == b"hello"
    assert program.recv(100) == b""
    program.sendall(b"HELLO")
    program.close()
    pump(port, host)
    assert read_all(caller) == b"HELLO"
    pump(port, lost := SocketConnection(program))  # neither is there any more
    for end in (port, lost):
        end.close()
    close_all(caller, host)


def test_bytes_arrive_in_both_directions_and_nothing_is_left(store):
    caller, host = connect(store)
    caller.write(b"hello")
    caller.write(b"")
    assert host.read() == b"hello"
    host.write(b"HELLO")
    caller.finish()
    assert host.read() == b"", "it has finished"
    host.write(b"!")
    host.finish()
    assert read_all(caller) == b"HELLO!"
    assert caller.read() == b""
    close_all(caller, host, caller)
    assert list(store.list("tunnel")) == []


def test_once_the_host_has_finished_nobody_reads_what_is_written(store):
    caller, host = connect(store)
    host.finish()
    assert caller.read() == b""
    with pytest.raises(ConnectionError, match="closed"):
        caller.write(b"hello")
    caller.close()
    host.end()
    host.close()
    assert list(store.list("tunnel")) == []


def test_whoever_writes_faster_than_the_other_reads_waits(store, monkeypatch):
    monkeypatch.setattr(tunnel, "_MOST_PAUSE_S", 0.01)
    caller, host = connect(store)
    sent = bytes(range(256)) * (CHUNK_BYTES // 256 * (MOST_CHUNKS + 4))
    writing = threading.Thread(target=lambda: (caller.write(sent), caller.finish()))
    writing.start()
    while len(list(store.list("tunnel"))) < MOST_CHUNKS:
        writing.join(0.01)
    writing.join(0.2)
    assert writing.is_alive()
    assert len(list(store.list("tunnel"))) == MOST_CHUNKS
    assert read_all(host) == sent
    writing.join()
    close_all(caller, host)
    assert list(store.list("tunnel")) == []


def test_an_end_that_says_nothing_is_alive(store):
    caller, host = connect(store, alive_s=0.05, silent_s=5.0)
    reading = threading.Thread(target=caller.read)
    reading.start()
    while caller._read < 3:
        reading.join(0.01)
        assert reading.is_alive()
    host.finish()
    reading.join()
    close_all(caller, host)


@pytest.mark.parametrize("side", Side)
def test_an_end_that_is_gone_is_missed_and_what_is_left_is_removed(store, side, monkeypatch):
    gone = StoreConnection(store, "tunnel", side, alive_s=1000.0)
    gone.write(b"last words")
    (other,) = {*Side} - {side}
    left = StoreConnection(store, "tunnel", other, silent_s=0.2)
    assert left.read() == b"last words"
    with pytest.raises(ConnectionError, match="no sign of life"):
        left.read()
    monkeypatch.setattr(tunnel, "CLOSE_S", 1000.0)  # Nobody reads what it says last.
    left.close()
    assert list(store.list("tunnel")) == []


def test_ending_it_wakes_whoever_reads(store):
    caller, host = connect(store)
    reading = threading.Thread(target=caller.read)
    reading.start()
    caller.end()
    reading.join()
    close_all(caller, host)
    assert list(store.list("tunnel")) == []


def test_a_store_that_does_not_answer_is_an_error_of_the_connection(tmp_path):
    (tmp_path / "store").touch()
    caller = StoreConnection(LocalStore(tmp_path / "store"), "tunnel", Side.CALLER)
    with pytest.raises(ConnectionError):
        caller.write(b"hello")
    caller.close()
