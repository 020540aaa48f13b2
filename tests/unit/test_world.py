"""A process that joins the JAX world: its arguments and settings, computed without JAX."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kinetic._host.worker import jaxworld, joining
from kinetic._host.worker.home import Home
from kinetic._host.worker.joining import World

WORLD = World("127.0.0.1:4001", 2, 1, 4, "tpu", True, port=4002, file="/host/world", limit_s=60.0)
DIRECT = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"no_proxy": f"{DIRECT},10.0.0.7"}),
        (
            {"no_proxy": "a.example, b.example"},
            {"no_proxy": f"a.example,b.example,{DIRECT},10.0.0.7"},
        ),
        ({"NO_PROXY": "127.0.0.1"}, {"no_proxy": "127.0.0.1,localhost,::1,10.0.0.7"}),
        ({"no_proxy": "a", "NO_PROXY": "b"}, {"no_proxy": f"a,b,{DIRECT},10.0.0.7"}),
        ({"NO_PROXY": "*"}, {"no_proxy": "*", "no_grpc_proxy": f"{DIRECT},10.0.0.7"}),
        (
            {"no_grpc_proxy": "c"},
            {"no_proxy": f"{DIRECT},10.0.0.7", "no_grpc_proxy": f"c,{DIRECT},10.0.0.7"},
        ),
    ],
)
def test_the_hosts_are_reached_past_proxies_and_what_was_excepted_stays(before, after):
    for _ in range(2):  # The second call changes nothing.
        joining.pass_by_proxies(before, ["10.0.0.7"])
        assert before == after | {"NO_PROXY": after["no_proxy"]}


def test_variables_that_name_proxies():
    assert joining.uses_proxies(["PATH", "Https_Proxy"])
    assert joining.uses_proxies(["grpc_proxy"])
    assert not joining.uses_proxies(["PATH", "no_proxy", "NO_GRPC_PROXY", "MY_PROXY_HOST"])


def test_the_environment_holds_what_each_framework_reads_and_the_caller_wins():
    env = jaxworld.environ(
        WORLD, {"PATH": "/bin", "RANK": "9"}, {"MASTER_PORT": "1"}, automatic=True
    )
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"], env["MASTER_PORT"]) == (
        "1",
        "2",
        "127.0.0.1",
        "1",
    )
    assert (env["NODE_RANK"], env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "1", "2"), (
        "Lightning takes every host for the first without"
    )
    assert "TORCHELASTIC_RUN_ID" not in env, "torch would look for torchrun's store"
    assert (env["PET_MASTER_PORT"], env["PET_NNODES"], env["PET_NODE_RANK"]) == ("4002", "2", "1")
    assert (env["PATH"], env["JAX_PROCESS_ID"], env["JAX_PLATFORMS"]) == ("/bin", "1", "cpu")
    assert json.loads(env["KINETIC_WORLD"]) == WORLD.to_json() | {"automatic": True}


def test_simulated_devices_have_threads_to_spare_unless_the_caller_says_otherwise():
    assert (
        int(jaxworld.environ(WORLD, {"NPROC": "1"}, {}, automatic=True)["NPROC"])
        >= 4 * WORLD.devices
    )
    assert jaxworld.environ(WORLD, {}, {"NPROC": "1"}, automatic=True)["NPROC"] == "1"
    assert (jaxworld._count_threads(4, cores=2), jaxworld._count_threads(4, cores=96)) == (16, 96)
    real = World("127.0.0.1:4001", 2, 1, 0, "tpu", False)
    assert "NPROC" not in jaxworld.environ(real, {}, {}, automatic=True)


def test_a_cpu_host_of_a_cluster_has_its_devices_and_no_address_of_a_simulation():
    env = jaxworld.environ(World("10.0.0.7:4001", 2, 1, 4, "cpu", False), {}, {}, automatic=True)
    assert (env["JAX_NUM_CPU_DEVICES"], env["JAX_PLATFORMS"]) == ("4", "cpu")
    assert not {"JAX_COORDINATOR_BIND_ADDRESS", "GLOO_SOCKET_IFNAME"} & set(env)


@pytest.mark.parametrize(
    ("platform", "clients"), [("tpu", "tpu,cpu"), ("gpu", "cuda,cpu"), ("proxy", "proxy,cpu")]
)
def test_jax_has_the_processor_beside_an_accelerator(platform, clients):
    world = World("127.0.0.1:1", 1, 0, 0, platform, simulated=False)
    assert jaxworld.environ(world, {}, {}, automatic=True)["JAX_PLATFORMS"] == clients
    requested = {"JAX_PLATFORMS": platform}
    assert jaxworld.environ(world, {}, requested, automatic=True)["JAX_PLATFORMS"] == platform


@pytest.mark.parametrize(("file", "warns"), [("/dev/null", False), ("/dev/absent", True)])
def test_a_host_without_its_gpu_says_so(monkeypatch, capsys, file, warns):
    """A host whose GPU has no device file prints a warning: JAX would silently use the CPU."""
    monkeypatch.setattr(jaxworld, "GPU_FILES", (file,))
    monkeypatch.setattr(jaxworld.os, "environ", {})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.delitem(sys.modules, "jax.distributed", raising=False)
    jaxworld.enter(World("127.0.0.1:1", 1, 0, 0, "gpu", simulated=False), joins=False)
    assert ("no NVIDIA GPU" in capsys.readouterr().err) == warns


def test_the_environment_for_programs_is_completed_once_even_if_called_twice():
    env = {"PYTHONPATH": "/mine"}
    for _ in range(2):
        joining.complete(env, WORLD, "/startup")
        assert env == {"PYTHONPATH": f"/startup{os.pathsep}/mine"}
    env["Https_Proxy"] = "http://p"
    joining.complete(env, WORLD, "/startup")
    assert env["no_proxy"] == DIRECT


def test_a_lone_host_has_torchs_variables_and_no_others():
    env = jaxworld.environ(
        World("127.0.0.1:1", 1, 0, 4, "tpu", True, port=2), {}, {}, automatic=False
    )
    assert (env["WORLD_SIZE"], env["MASTER_PORT"]) == ("1", "2")
    assert not [name for name in env if name.startswith("PET_")]
    assert "JAX_COORDINATOR_ADDRESS" not in env


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({}, {}),
        ({"num_processes": 2, "process_id": None}, {}),
        ({"coordinator_address": "localhost:4001"}, {}),
        ({"coordinator_address": "10.0.0.1:4001"}, {"coordinator_address": "10.0.0.1:4001"}),
        ({"num_processes": 3, "process_id": 0}, {"num_processes": 3, "process_id": 0}),
    ],
)
def test_arguments_that_disagree_are_found(arguments, wrong):
    assert joining.find_differing(WORLD, arguments) == wrong


@pytest.mark.starts_processes
def test_only_one_process_of_a_host_joins_jax_at_a_time(tmp_path):
    file = str(tmp_path / "world")
    assert joining.join_state(file) == ""
    with joining._claim_place(file):
        # Check in forks: closing the file in this process would free the lock.
        assert _in_fork(lambda: joining.join_state(file) == joining.JOINING)
        assert _in_fork(lambda: _is_taken(file))
    assert _in_fork(lambda: joining.join_state(file) == joining.JOINED)
    assert _in_fork(lambda: _is_taken(file))


@pytest.mark.starts_processes
def test_a_process_that_could_not_join_leaves_the_place_to_another(tmp_path):
    file = str(tmp_path / "world")
    with pytest.raises(ZeroDivisionError), joining._claim_place(file):
        raise ZeroDivisionError
    assert joining.join_state(file) == joining.APART
    assert not _in_fork(lambda: _is_taken(file))


@pytest.mark.starts_processes
def test_a_process_that_died_while_it_joined_joins_no_more(tmp_path):
    file = str(tmp_path / "world")

    def die():
        joining._claim_place(file).__enter__()
        os._exit(0)

    _in_fork(die)
    assert joining.join_state(file) == joining.APART


def _is_taken(file):
    try:
        with joining._claim_place(file):
            return False
    except joining.HostTaken as taken:
        return str(os.getppid()) in str(taken)


def _in_fork(ask):
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = int(bool(ask()))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.starts_processes
def test_a_program_without_kinetic_can_load_it():
    code = """if True:
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("kinetic_joining", sys.argv[1])
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(module.World("127.0.0.1:1", 2, 1, 0, "cpu", True).processes, "kinetic" in sys.modules)
    """
    line = [sys.executable, "-IS", "-c", code, joining.__file__]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr) == ("2 False\n", "")


class JaxRuntimeError(RuntimeError):
    """A stand-in for JAX's error, which kinetic recognizes by the class name alone."""


def break_a_collective(*, own):
    try:
        raise JaxRuntimeError("UNAVAILABLE: connection reset by peer")
    except JaxRuntimeError:
        if own:
            raise ValueError("no luck") from None
        raise ValueError("no luck")  # noqa: B904


@pytest.mark.parametrize(("own", "follows"), [(True, False), (False, True)])
def test_an_error_raised_from_a_broken_collective_is_a_consequence(own, follows):
    with pytest.raises(ValueError, match="no luck") as raised:
        break_a_collective(own=own)
    assert jaxworld.is_consequence(raised.value) is follows


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:35236", True),
        ("the peer must be a host name", False),
    ],
)
def test_a_collective_that_breaks_while_it_is_launched_is_a_consequence(text, follows):
    """A peer ended while jaxlib started a collective, which raises a ValueError: kinetic blames the
    peer, not this function."""
    assert jaxworld.is_consequence(ValueError(text)) is follows


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device. Free some space, or set KINETIC_LOCAL_DIR in"),
        (errno.EROFS, "Read-only file system. Set KINETIC_LOCAL_DIR in env="),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(number, words):
    home = Home("/dev/shm/kinetic-0/job-1/host-0", "/dev/shm/kinetic-0/job-1/local", 0, 4)
    message = home.explain(OSError(number, os.strerror(number)))
    assert message.startswith("The folder of local files /dev/shm/kinetic-0/job-1 cannot")
    assert words in message


def test_the_log_level_of_xla_is_1_unless_the_caller_sets_it() -> None:
    """XLA's log level on hosts is 1, unless the caller sets TF_CPP_MIN_LOG_LEVEL."""
    name = "TF_CPP_MIN_LOG_LEVEL"
    assert jaxworld.environ(WORLD, {}, {}, automatic=True)[name] == "1"
    assert jaxworld.environ(WORLD, {name: "0"}, {}, automatic=True)[name] == "0"
    assert jaxworld.environ(WORLD, {}, {name: "2"}, automatic=True)[name] == "2"


def test_the_heartbeat_limit_is_long_in_functions_and_short_in_programs(monkeypatch):
    """JAX gives up silent peers after HEARTBEAT_S: a week in functions, whose agents report deaths,
    and 100 s in programs, of which an agent may see only the shell."""
    spec = importlib.util.spec_from_file_location("kinetic_joining", joining.__file__)
    in_program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, in_program)
    spec.loader.exec_module(in_program)
    assert (in_program.HEARTBEAT_S, joining.HEARTBEAT_S > 86_400) == (100, True)
