"""JAX's world works behind proxies, next to other frameworks, in forks, and on slices of one host.
Other frameworks find the variables that they read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import joining_cases
import pytest
from joining_cases import JOINS, NOWHERE, PROXIES, ROOT, TWO, run, write

import kinetic

project = joining_cases.project


@pytest.mark.parametrize("joins_jax", [True, "lazy"])
def test_the_hosts_talk_to_each_other_past_every_proxy(joins_jax, monkeypatch):
    for name in PROXIES:
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_grpc_proxy", "example.net")

    @kinetic.run(
        accelerator=TWO,
        joins_jax=joins_jax,
        env={"grpc_proxy": NOWHERE, "no_grpc_proxy": "example.net"},
    )
    def read_proxies():
        import os

        import jax

        return (
            jax.device_count(),
            os.environ["https_proxy"],
            os.environ["no_proxy"].split(","),
            os.environ["no_grpc_proxy"],  # noqa: SIM112
        )

    count, proxy, direct, direct_grpc = read_proxies()
    assert (count, proxy) == (8, NOWHERE)
    assert {"example.org", "127.0.0.1", "localhost"} <= set(direct)
    assert direct_grpc.startswith("example.net,")


def test_a_program_joins_past_proxies_that_it_sets_itself(project):
    write(
        project,
        "train.py",
        f"import os\nfor name in {PROXIES!r}: os.environ[name] = {NOWHERE!r}\n"
        "os.environ['no_proxy'] = 'example.org'\nimport jax\nprint(jax.device_count())\n",
    )
    assert run(project, "--", sys.executable, "train.py", https_proxy=NOWHERE) == [
        "[host 0] 8",
        "[host 1] 8",
    ]


def test_programs_of_other_frameworks_find_their_variables():
    @kinetic.run(accelerator=TWO)
    def variables():
        import os
        import socket

        with socket.socket() as free:
            if os.environ["RANK"] != "0":
                return None
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            free.listen()
        names = (
            "MASTER_ADDR",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "PET_NNODES",
            "PET_NODE_RANK",
        )
        return [os.environ[name] for name in names], os.environ["MASTER_PORT"] == os.environ[
            "PET_MASTER_PORT"
        ]

    assert variables() == (["127.0.0.1", "0", "2", "0", "1", "2", "0"], True)


def test_every_host_is_told_the_same_port(project):
    ports = run(project, "--", "sh", "-c", "echo $MASTER_PORT $JAX_COORDINATOR_ADDRESS")
    assert len({re.sub(r"^\[host \d\] ", "", line) for line in ports}) == 1


def test_programs_meet_jax_also_where_the_function_captured_a_path_of_its_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/nowhere{os.pathsep}{ROOT}")

    @kinetic.run(accelerator=TWO, joins_jax="program", capture_env_vars=["PYTHONPATH"])
    def start():
        import sys

        return subprocess.check_output(
            [sys.executable, "-c", "import jax; print(jax.device_count())"], text=True
        )

    assert start() == "8\n"


def test_a_fork_that_imports_jax_first_stands_alone():
    # With a variable of JAX in env=, kinetic does not import JAX before the function forks.
    @kinetic.run(accelerator=TWO, env={"JAX_TRACEBACK_FILTERING": "off"})
    def fork():
        import os
        import sys

        assert "jax" not in sys.modules
        pid = os.fork()
        if pid == 0:
            import jax

            os._exit(jax.device_count())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert fork() == 4


def test_slices_of_one_host_each_are_one_world() -> None:
    @kinetic.run(accelerator="cpu:2", slices=3)
    def total() -> tuple[float, int, int]:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(jax.devices(), ("x",))
        ones = jax.make_array_from_callback(
            (6,), NamedSharding(mesh, PartitionSpec("x")), lambda _: jnp.ones(1)
        )
        return float(jax.jit(jnp.sum)(ones)), jax.process_count(), jax.local_device_count()

    assert total() == (6.0, 3, 2)


def test_a_program_on_slices_of_one_host_each(project: Path) -> None:
    script = write(project, "joins.py", JOINS)
    assert run(project, "--slices", "2", script, accelerator="cpu:2") == [
        "[host 0] 0 2 4",
        "[host 1] 1 2 4",
    ]
