"""Scaling of the coordinator: 64 and 1,024 agents over real gRPC, compared with a bare gRPC server
with the same traffic.

In: nothing (`--hosts 64 1024 --runs 3 --steady-s 5`). Out: a table. Run by hand:
`python benchmarks/gang_scale.py`.

The coordinator has its own process; the agents share two client processes with several connections
each. The floor is a server without messages, token or state: it answers as many unary calls and
sends as many bytes on as many streams. All processes share this machine's cores; CPU seconds are
those of the server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
from grpc import aio

from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, Gang, GangSpec, Heartbeat
from kinetic._core.outcome import HostReport
from kinetic._rpc import codec
from kinetic._rpc.server import Coordinator

TOKEN = "benchmark"
CLIENTS = 2
CONNECTIONS = 8
JOB = "job-00000000"
METADATA = codec.metadata_of(Endpoint("", TOKEN, JOB))
RAW = (bytes, bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steady-s", type=float, default=5.0)
    parser.add_argument(
        "--role", nargs=3, metavar=("ROLE", "ADDRESS", "DETAILS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.role:
        role, address, details = options.role
        asyncio.run(
            {"kinetic": serve, "bare": serve_bare, "agents": run_agents}[role](
                address, json.loads(details)
            )
        )
        return
    results = {}
    for hosts in options.hosts:
        for kind in ("kinetic", "bare"):
            runs = [measure(kind, hosts, options.steady_s) for _ in range(options.runs)]
            results[hosts, kind] = {
                key: statistics.median(run[key] for run in runs) for key in runs[0]
            }
    show(results, options)


# --- one run


class Process:
    """A process with one role (server or agents), which reads and writes lines of JSON."""

    def __init__(self, role: str, address: str, details: object) -> None:
        command = [sys.executable, __file__, "--role", role, address, json.dumps(details)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()

    def send(self, *words: object) -> None:
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def read(self) -> object:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark died; its error is above")
        return json.loads(line)

    def ask(self, *words: object) -> object:
        self.send(*words)
        return self.read()

    def close(self) -> None:
        self._process.stdin.close()
        if self._process.wait(30) != 0:
            raise SystemExit("a process of the benchmark failed; its error is above")
        self._process.stdout.close()


def measure(kind: str, hosts: int, steady_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/s"
        server = Process(kind, address, hosts)
        clients = [
            Process("agents", address, [kind, list(range(hosts))[i::CLIENTS]])
            for i in range(CLIENTS)
        ]
        run_on_all(clients, "connect")
        start = server.ask("usage")
        join_s = run_on_all(clients, "join")
        joined = server.ask("usage")
        beat_s = run_on_all(clients, "beat", steady_s)
        beaten = server.ask("usage")
        report_s = run_on_all(clients, "report")
        for process in (*clients, server):
            process.close()
    return {
        "join to ready, ms": 1e3 * join_s,
        "server CPU of it, ms": 1e3 * (joined["cpu_s"] - start["cpu_s"]),
        "beats each 1 s, % of a core": 100 * (beaten["cpu_s"] - joined["cpu_s"]) / beat_s,
        "report to all done, ms": 1e3 * report_s,
        "server memory, MB": beaten["rss_bytes"] / 1e6,
    }


def run_on_all(processes: list[Process], *words: object) -> float:
    start = time.perf_counter()
    for process in processes:
        process.send(*words)
    for process in processes:
        process.read()
    return time.perf_counter() - start


# --- servers


async def serve(address: str, hosts: int) -> None:
    # The agents share two processes and send heartbeats in one phase only: disable timeouts.
    spec = GangSpec(hosts=hosts, hang_timeout_s=600.0, heartbeat_timeout_s=600.0)
    gang = Gang(spec, time.monotonic())
    coordinator = Coordinator(gang, Endpoint(address, TOKEN, JOB))
    await coordinator.start()
    await answer_usage()
    if not gang.view(0).all_done:
        raise SystemExit(f"the gang did not end well: {gang.stop_reason}")
    await coordinator.stop()


class Bare:
    """The floor: a server with the same traffic that does nothing else. After each `hosts` calls,
    it sends one message on every stream."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._calls = 0
        self._round = asyncio.Event()
        self._push = (
            b"x" * len(codec.write(Gang(GangSpec(hosts=1), 0.0).view(0)))
            + b"127.0.0.1:12345" * hosts
        )

    def service(self, details: object) -> object:
        if details.method == codec.WATCH.path:
            return grpc.unary_stream_rpc_method_handler(self._watch, *RAW)
        return grpc.unary_unary_rpc_method_handler(
            self._beat if details.method == codec.HEARTBEAT.path else self._call, *RAW
        )

    async def _beat(self, request: bytes, context: object) -> bytes:
        return b"ok"

    async def _call(self, request: bytes, context: object) -> bytes:
        self._calls += 1
        if self._calls % self._hosts == 0:
            done, self._round = self._round, asyncio.Event()
            done.set()
        return b"ok"

    async def _watch(self, request: bytes, context: object):
        while True:
            done = self._round
            yield self._push
            await done.wait()


async def serve_bare(address: str, hosts: int) -> None:
    server = aio.server(options=codec.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Bare(hosts),))
    server.add_insecure_port(address)
    await server.start()
    await answer_usage()
    await server.stop(0.1)


async def answer_usage() -> None:
    print(json.dumps("listening"), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        facts = {
            "cpu_s": used.ru_utime + used.ru_stime,
            "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }
        print(json.dumps(facts), flush=True)


# --- agents


class Agents:
    """Some of the gang's agents, which share a few connections."""

    def __init__(self, address: str, kind: str, hosts: list[int]) -> None:
        options = (*codec.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channels = [
            aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)
        ]
        self._hosts = hosts
        self._bare = kind == "bare"
        self._streams: list[object] = []

    def _call(self, host: int, method: codec.Method, request: object) -> object:
        channel = self._channels[host % CONNECTIONS]
        make = channel.unary_stream if method.streams else channel.unary_unary
        writes, reads = (
            RAW if self._bare else (codec.write, functools.partial(codec.read, kind=method.reply))
        )
        return make(method.path, writes, reads)(
            b"x" * 40 if self._bare else request, metadata=METADATA
        )

    async def connect(self) -> None:
        self._streams = [
            self._call(host, codec.WATCH, codec.WatchRequest(host)) for host in self._hosts
        ]
        await self._wait_for_view(lambda view: True)

    async def join(self) -> None:
        calls = [
            self._call(
                h,
                codec.JOIN,
                codec.JoinRequest(h, f"agent-{h}", "127.0.0.1:12345"),
            )
            for h in self._hosts
        ]
        await asyncio.gather(self._wait_for_view(lambda view: view.ready), *calls)

    async def report(self) -> None:
        calls = [
            self._call(h, codec.REPORT, json.dumps(HostReport(h, Exit.RETURNED).to_json()).encode())
            for h in self._hosts
        ]
        await asyncio.gather(self._wait_for_view(lambda view: view.all_done), *calls)

    async def beat(self, seconds: float) -> None:
        await asyncio.gather(*(self._beat(i, host, seconds) for i, host in enumerate(self._hosts)))

    async def _beat(self, index: int, host: int, seconds: float) -> None:
        await asyncio.sleep(index / len(self._hosts))
        for _ in range(round(seconds)):
            beat = Heartbeat(host, Activity.RUNNING, 0.1, 123456789, 12.5, 4096, "step 3")
            start = time.perf_counter()
            await self._call(host, codec.HEARTBEAT, None if self._bare else beat)
            await asyncio.sleep(1.0 - (time.perf_counter() - start))

    async def _wait_for_view(self, wanted) -> None:
        await asyncio.gather(*(self._wait_on_stream(stream, wanted) for stream in self._streams))

    async def _wait_on_stream(self, stream, wanted) -> None:
        while not self._bare and not wanted(await stream.read()):
            pass
        if self._bare:
            await stream.read()


async def run_agents(address: str, details: list) -> None:
    agents = Agents(address, *details)
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *arguments = json.loads(line)
        await getattr(agents, word)(*arguments)
        print(json.dumps("done"), flush=True)
    os._exit(0)  # Only the server can end the streams.


# --- the table


def show(results: dict, options: argparse.Namespace) -> None:
    keys = list(next(iter(results.values())))
    shared = f"{os.cpu_count()} cores shared by the server and {CLIENTS} client processes"
    print(f"A gang over a Unix socket, median of {options.runs} runs; {shared}")
    print(f"{'':30}{'hosts':>7}{'kinetic':>11}{'bare gRPC':>11}{'ratio':>8}")
    for key in keys:
        for hosts in options.hosts:
            ours, floor = results[hosts, "kinetic"][key], results[hosts, "bare"][key]
            name = key if hosts == options.hosts[0] else ""
            print(f"{name:30}{hosts:>7}{ours:>11.1f}{floor:>11.1f}{ours / max(floor, 1e-9):>8.2f}")
    first, last = options.hosts[0], options.hosts[-1]
    if first != last:
        print(f"\nGrowth from {first} to {last} hosts ({last / first:g} times as many):")
        for key in keys:
            ours, floor = (
                results[last, k][key] / max(results[first, k][key], 1e-9)
                for k in ("kinetic", "bare")
            )
            print(f"{key:30}{'':7}{ours:>10.1f}x{floor:>10.1f}x")


if __name__ == "__main__":
    main()
