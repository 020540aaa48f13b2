"""The processes that the local backend starts to simulate the hosts of a plan."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import replace

import pytest
from laptop_fakes import plan

from kinetic._backends.local import simulation
from kinetic._backends.local.backend import LocalBackend
from kinetic._store.local import LocalStore
from kinetic._system import machine
from kinetic.errors import PreflightError, UsageError


@pytest.mark.parametrize(
    ("accelerator", "controller", "options", "modules"),
    [
        ("cpu", "multi", {}, []),
        ("tpu-v6e-16", "multi", {}, ["numpy", "jax"]),
        ("tpu-v6e-16", "multi", {"joins_jax": False}, []),
        ("tpu-v6e-16", "multi", {"env": {"XLA_FLAGS": ""}}, []),
        ("tpu-v6e-16", "single", {}, ["numpy", "jax"]),
        ("tpu-v6e-16", "single", {"joins_jax": False}, []),
    ],
)
def test_jax_is_imported_once_where_it_joins_hosts_or_has_the_devices_of_all(
    accelerator, controller, options, modules
):
    chosen = options | {"controller": controller}
    document = simulation.document(plan(accelerator=accelerator, options=chosen))
    assert document["preload"] == modules


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def check(folder):
        simulation.check_places(replace(plan(), output_dir=str(folder)), [])

    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file"):
        check(tmp_path / "file/out")
    monkeypatch.setattr(os, "access", lambda *_: False)
    check(tmp_path)  # The folder exists: it may be read-only.
    with pytest.raises(UsageError, match=f"you may not write to {tmp_path}"):
        check(tmp_path / "a/b")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENETUNREACH, "Network is unreachable"), (errno.EADDRNOTAVAIL, "Cannot assign")],
)
def test_several_hosts_need_a_loopback_address(tmp_path, monkeypatch, number, words):
    backend = LocalBackend(LocalStore(tmp_path), {}, available_memory_bytes=lambda: None)
    backend.preflight(several := plan(accelerator="tpu-v6e-16"))

    def refuse(*_, **__):
        raise OSError(number, "")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(PreflightError, match=rf"127.0.0.1.*{words}.*`ip link set lo up`"):
        backend.preflight(several)
    backend.preflight(plan(accelerator="cpu"))
    number = errno.EMFILE  # Too many open files: no network fault.
    backend.preflight(several)


def test_a_loopback_address_that_drops_what_is_sent_is_found(monkeypatch):
    def wait_in_vain(client, address):
        assert client.gettimeout(), "it would wait for minutes"
        raise TimeoutError("timed out")

    waiting = type("Waiting", (socket.socket,), {"connect": wait_in_vain})
    monkeypatch.setattr(socket, "socket", waiting)
    assert machine.loopback_fault() == "connections to it are not answered"
