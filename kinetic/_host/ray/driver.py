"""The leader of a job as a driver that Ray's Jobs API starts. It reserves machines slice by slice;
an actor on each machine runs the program of a host.

The driver runs no function. Hosts join over TCP with a token and a certificate that the driver
makes: Ray shows the variables of a submission to everybody. Ray's calls are slow, so threads make
them, and pass the results to the leader's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future

from kinetic._core import layout, record
from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.outcome import HostReport
from kinetic._core.plan import Plan
from kinetic._core.quantities import amount_of, bytes_of
from kinetic._core.variables import select_start_variables
from kinetic._host import identity, program
from kinetic._host.agents import WORKER_LOST
from kinetic._host.hosts import RemoteHosts
from kinetic._host.ray import cluster
from kinetic._host.ray.cluster import HostPlace, MachinesLost, Needs, NoLongerWanted, Reservation
from kinetic._ray.jobs_api import secrets_package
from kinetic._rpc import certificate
from kinetic._store.base import Store
from kinetic.errors import KineticError, SubmitError

TELL_EVERY_S = 2.0
DRAINING_EVERY_S = 1.0
"""Seconds between two calls that list draining nodes. A call takes about a millisecond."""
MOST_STARTS, START_AGAIN_S = 3, 2.0
"""Number of times that a slice is reserved if it loses a machine before its hosts start, and the
pause in seconds: a fault that ends actors on every machine must not repeat forever."""
Variables = Callable[[int, HostPlace], Mapping[str, str]]
"""Returns the variables of a host's program, by the host's index among all hosts of the job."""


class _SliceStart:
    """One start of a slice: its reservation and its progress."""

    def __init__(self, which: int, reservation: Reservation) -> None:
        self.which = which
        self.reservation = reservation
        self.places: list[HostPlace] = []
        self.runs = False
        self.is_wanted = True
        self.leaving: set[int] = set()
        """Hosts whose programs were told that their node is draining."""


class RayHosts(RemoteHosts):
    """Hosts whose programs are started by actors, on slices that are reserved as a whole.

    If the job needs all of its slices, no program starts before all are reserved.
    """

    takes_orders = True

    def __init__(
        self,
        hosts: int,
        slices: int,
        needs: Needs,
        variables: Variables,
        *,
        starts_each: bool,
        limit_s: float,
        tell: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Make the hosts.

        Args:
            hosts, slices: numbers of hosts and slices of the job.
            needs: resources of one slice.
            variables: returns the variables of a host's program.
            starts_each: a slice may start before the others are reserved.
            limit_s: seconds to wait for a slice.
            tell: called, in threads, with the reason why the job waits, and with "" at the end.
        """
        super().__init__(hosts)
        self._slices, self._slice_hosts = slices, hosts // slices
        self._needs, self._variables = needs, variables
        self._starts_each, self._limit_s, self._tell = starts_each, limit_s, tell
        self._starts: dict[int, _SliceStart] = {}
        self._running: set[int] = set()
        """Hosts whose programs run, according to Ray."""
        self._has_begun = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serves, self._is_over = threading.Event(), threading.Event()
        self._cleaning: list[threading.Thread] = []

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """Give hosts their assignments. From now on, a host that cannot start counts as lost."""
        self._has_begun = True
        super().give(places)

    # -- processes ---------------------------------------------------------------------------------

    def reserve_all(self) -> None:
        """Begin to reserve all slices. Programs start only once the leader serves."""
        for which in range(self._slices):
            self._start(which)

    def reap(self) -> None:
        """Begin to watch for draining nodes at the first call, which comes once the leader serves.
        Ray itself reaps actors."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._serves.set()
            threading.Thread(target=self._watch_draining, daemon=True).start()

    def all_gone(self) -> bool:
        """True if the programs of all hosts that are not dead have ended."""
        return self._running <= self._dead

    def end(self, indices: Collection[int]) -> None:
        """Free the machines of each slice that has a dead host. Ray may count a lost machine as
        alive for a while, so it does not free the slice itself."""
        for which in {index // self._slice_hosts for index in indices}:
            if not self._dead.isdisjoint(self._indices(which)):
                self._release(which)

    def restart(self, indices: Collection[int]) -> None:
        """Reserve the slices of these hosts, unless they are reserved."""
        for which in {index // self._slice_hosts for index in indices}:
            if which not in self._starts:
                self._start(which)

    def kill(self, indices: Collection[int] | None = None) -> None:
        """Free the machines of these hosts' slices, which ends everything that runs on them."""
        if indices is None:
            indices = range(self._slices * self._slice_hosts)
        for which in {index // self._slice_hosts for index in indices}:
            self._release(which)

    def kill_programs(self, indices: Collection[int]) -> Collection[int]:
        """Kill the actors of these hosts, with which their programs die."""
        starts = {
            index: self._starts[index // self._slice_hosts] for index in self._running & {*indices}
        }
        for index, start in starts.items():
            cluster.kill_program(start.places[index % self._slice_hosts])
        return starts.keys()

    def release_all(self) -> None:
        """Free all machines, and wait until Ray has received the requests."""
        self._is_over.set()
        self.kill()
        for thread in self._cleaning:
            thread.join()

    def on_enter(self, index: int) -> None:
        """Count a waiting host as alive, unless its slice was freed: then its actor ends soon."""
        start = self._starts.get(index // self._slice_hosts)
        if start is not None and start.runs:
            super().on_enter(index)

    # -- draining nodes ----------------------------------------------------------------------------

    def _watch_draining(self) -> None:
        while not self._is_over.wait(DRAINING_EVERY_S):
            with contextlib.suppress(Exception):  # The next call may succeed.
                if draining := cluster.find_draining():
                    self._soon(self._on_draining, draining)

    def _on_draining(self, draining: Collection[str]) -> None:
        """Tell the hosts on these nodes that they will be taken away. If a slice's programs do not
        run yet, reserve other nodes instead."""
        for start in list(self._starts.values()):
            if not start.runs and not {*draining}.isdisjoint(start.reservation.nodes):
                self._release(start.which)
                self._start(start.which)
            for index, place in zip(self._indices(start.which), start.places, strict=False):
                if start.runs and place.node in draining and index not in start.leaving:
                    start.leaving.add(index)
                    cluster.take_away(place)

    # -- one slice ---------------------------------------------------------------------------------

    def _indices(self, which: int) -> range:
        return range(which * self._slice_hosts, (which + 1) * self._slice_hosts)

    def _start(self, which: int) -> None:
        start = self._starts[which] = _SliceStart(which, Reservation(self._needs))
        self._dead.update(self._indices(which))  # They count as dead until they wait.
        bring_up = functools.partial(self._bring_up, start)
        threading.Thread(target=bring_up, name=f"kinetic-slice-{which}", daemon=True).start()

    def _bring_up(self, start: _SliceStart) -> None:
        """Reserve the machines of a slice, and start its actors. Runs in a thread."""
        until, done = time.monotonic() + self._limit_s, threading.Event()
        telling = threading.Thread(target=self._keep_telling, args=(start, done), daemon=True)
        telling.start()
        try:
            places = self._place_hosts(start, until)
            if not start.is_wanted:
                raise NoLongerWanted
            self._soon(self._on_placed, start, places)
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the leader must hear of it
            start.reservation.release()  # `_release` may have run before all was reserved.
            why = f"Ray could not start its hosts: {cluster.describe_death(error)}"
            self._soon(self._on_lost, start, "" if isinstance(error, NoLongerWanted) else why)
        finally:
            done.set()
            telling.join()

    def _place_hosts(self, start: _SliceStart, until: float) -> list[HostPlace]:
        """Reserve a slice and start its actors; try again if it loses a machine meanwhile."""
        reservation, starts = start.reservation, 0
        while True:
            reservation.reserve(until=until, is_wanted=lambda: start.is_wanted)
            try:
                return reservation.start_actors(until=until, is_wanted=lambda: start.is_wanted)
            except MachinesLost:
                reservation.release()
                starts += 1
                if starts == MOST_STARTS or self._is_over.wait(START_AGAIN_S):
                    raise

    def _keep_telling(self, start: _SliceStart, done: threading.Event) -> None:
        while not done.wait(TELL_EVERY_S):
            with contextlib.suppress(Exception):  # The next call may succeed.
                self._tell(self._describe_wait())
        if all(other.places for other in list(self._starts.values()) if other is not start):
            self._tell("")

    def _describe_wait(self) -> str:
        waiting = [start for start in list(self._starts.values()) if not start.places]
        lacking = [start for start in waiting if not start.reservation.nodes]
        if waiting and not lacking:
            return "its nodes are reserved, and Ray installs its requirements and starts its hosts"
        return cluster.describe_lack(self._needs, max(len(lacking), 1))

    def _soon(self, act: Callable[..., None], *values: object) -> None:
        self._serves.wait()
        with contextlib.suppress(RuntimeError):  # The leader has stopped serving.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(act, *values)

    def _on_placed(self, start: _SliceStart, places: list[HostPlace]) -> None:
        if self._starts.get(start.which) is not start:
            return
        start.places = places
        begun = any(other.runs for other in self._starts.values())
        if self._starts_each or begun or len(self._starts) < self._slices:
            self._run_programs(start)
        elif all(other.places for other in self._starts.values()):
            for other in self._starts.values():
                self._run_programs(other)

    def _run_programs(self, start: _SliceStart) -> None:
        start.runs = True
        for index, place in zip(self._indices(start.which), start.places, strict=True):
            self._running.add(index)
            running = cluster.run_program(place, self._variables(index, place))
            running.add_done_callback(
                functools.partial(self._soon, self._on_end, start, index, place)
            )

    def _on_end(
        self, start: _SliceStart, index: int, place: HostPlace, ended: Future[tuple[int, str]]
    ) -> None:
        """Handle the end of a program, or the death of its actor."""
        if self._starts.get(start.which) is not start:
            return
        self._running.discard(index)
        if (error := ended.exception()) is not None:
            why = f"its actor on {place.address} died: {cluster.describe_death(error)}"
            self._die(index, why)
            return
        code, stderr = ended.result()
        if code == ProgramCode.UNUSABLE:
            lines = stderr.strip().splitlines()
            host = f"Its program could not begin on node {place.address} (Ray's {place.node[:12]})"
            self._refuse(index, f"{host}: {lines[-1] if lines else 'no reason known'}")
        elif code not in (ProgramCode.DELIVERED, ProgramCode.CODE_FAILED):
            self._die(index, _describe_end(code, place.address))
        self._listener.on_change()

    def _on_lost(self, start: _SliceStart, why: str) -> None:
        """Handle a slice that could not start; `why` is "" if the job no longer needs the slice."""
        if self._starts.get(start.which) is not start:
            return
        self._release(start.which)
        if why:
            self._refuse(self._indices(start.which)[0], why)
        self._listener.on_change()

    def _refuse(self, index: int, why: str) -> None:
        """Handle a host that cannot start: before the first attempt the job fails, later the host
        counts as lost."""
        if self._has_begun:
            self._die(index, why)
        else:
            self._listener.on_report(HostReport(index, Exit.SETUP_FAILED, why))

    def _release(self, which: int) -> None:
        start = self._starts.pop(which, None)
        self._dead.update(self._indices(which))
        self._running.difference_update(self._indices(which))
        if start is not None:
            start.is_wanted = False
            cleaning = threading.Thread(target=start.reservation.release, daemon=True)
            cleaning.start()
            self._cleaning.append(cleaning)


def _describe_end(code: int, address: str) -> str:
    """Return a sentence about the end of a program that did not deliver its report."""
    if code == ProgramCode.WORKER_LOST:
        return WORKER_LOST
    taken_away = code == ProgramCode.TAKEN_AWAY
    how = "was told to end" if taken_away else f"ended with exit code {code}"
    return f"its program on {address} {how}."


_JOIN_S = "30"
"""Seconds for which a host's program tries to reach the leader, which already serves then."""


class _Driver:
    """Makes the hosts of this job, and the environment variables of their programs."""

    def __init__(self, variables: Mapping[str, str], address: str, port: int) -> None:
        endpoint = Endpoint(f"{address}:{port}", os.urandom(16).hex(), variables["KINETIC_JOB_ID"])
        credentials = certificate.make(endpoint.tls_name)
        self._gang = {
            "KINETIC_JOB_ID": endpoint.job_id,
            "KINETIC_STORE": cluster.locate_store(variables["KINETIC_STORE"]),
            "KINETIC_COORDINATOR": endpoint.target,
            "KINETIC_TOKEN": endpoint.token,
            "KINETIC_TLS_CERTIFICATE": credentials.certificate,
            "KINETIC_JOIN_TIMEOUT_S": _JOIN_S,
            "KINETIC_SIMULATED": variables.get("KINETIC_SIMULATED", ""),
            "KINETIC_TEE": "1",
            "RAY_ADDRESS": cluster.find_address(),  # For functions that use Ray themselves.
        }
        self._address, self._key = address, credentials.key
        self._function_variables: Mapping[str, str] = {}
        self.hosts: RayHosts | None = None

    def own_variables(self) -> dict[str, str]:
        """Return the variables with which this process leads the job."""
        return self._gang | {
            "KINETIC_ROLE": "head",
            "KINETIC_HOSTS": "1",
            "KINETIC_HOST_INDEX": "0",
            "KINETIC_POD_INDEX": "0",
            "KINETIC_HOST_ADDRESS": self._address,
            "KINETIC_TLS_KEY": self._key,
        }

    def make_hosts(self, plan: Plan, store: Store) -> RayHosts:
        """Return the hosts of the job, and begin to reserve their machines."""
        self._function_variables = select_start_variables(plan.options.env) | _take_secrets(plan)
        self._gang["KINETIC_HOSTS"] = str(plan.hosts)
        most, limit_s = plan.options.most_slices, plan.limits.start_timeout_s
        elastic = plan.elastic_gang
        self.hosts = RayHosts(
            plan.hosts,
            most,
            needs_of(plan),
            self._variables_of,
            starts_each=elastic is not None,
            limit_s=math.inf if elastic is not None else limit_s,
            tell=_WaitingNote(store, plan.job_id).tell,
        )
        self.hosts.reserve_all()
        return self.hosts

    def _variables_of(self, index: int, place: HostPlace) -> dict[str, str]:
        own = {
            "KINETIC_ROLE": "host",
            "KINETIC_HOST_INDEX": str(index),
            "KINETIC_POD_INDEX": str(index),
            "KINETIC_HOST_ADDRESS": place.address,
            "KINETIC_DEBUG_PORT": "0",  # Nodes may have hosts of several jobs.
        }
        return {**self._function_variables, **self._gang, **own}


class _WaitingNote:
    """Writes into the store why the job waits, or last waited."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store, self._key = store, layout.JobKeys(job_id).wait_note
        self._note: dict[str, object] = {"reason": "", "is_over": True}

    def tell(self, reason: str) -> None:
        """Write the reason if it has changed; "" means that the job no longer waits."""
        note = {"reason": reason or self._note["reason"], "is_over": not reason}
        if note != self._note:
            self._note = note
            with contextlib.suppress(KineticError):
                self._store.put(self._key, json.dumps(note).encode())


def needs_of(plan: Plan) -> Needs:
    """Return the resources that each slice of a job needs."""
    cpus, memory = plan.options.cpu, plan.options.memory
    most = {"cpus": amount_of(cpus)} if cpus else {}
    return Needs(plan.topology, memory_bytes=bytes_of(memory or ""), **most)


def _take_secrets(plan: Plan) -> dict[str, str]:
    """Return the values of the user's secrets, and delete them from the cluster.

    Raises:
        SubmitError: the cluster no longer has them.
    """
    if not plan.secrets:
        return {}
    package = cluster.take_package(secrets_package(plan.job_id))
    if package is None:
        raise SubmitError(
            f"the values of secrets={sorted(plan.secrets)} are no longer in the cluster: Ray keeps "
            "them for ten minutes, and the driver did not start within that time. Call the "
            "function again."
        )
    return {str(name): str(value) for name, value in record.parse(package).items()}


@contextlib.contextmanager
def _hold_port(address: str) -> Iterator[int]:
    """Reserve a free port: bind it with SO_REUSEADDR without listening. A server in this process
    can bind the port with the same option; the system gives the port to no other process."""
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((address, 0))
        yield port.getsockname()[1]


def main() -> int:
    """Lead the job until it has ended, and free everything that it has in the cluster."""
    try:
        address = cluster.connect()
    except KineticError as error:
        sys.stderr.write(f"kinetic: {error}\n")
        return ProgramCode.UNUSABLE
    with _hold_port(address) as port:
        driver = _Driver(identity.environ_with({}), address, port)
        try:
            return program.main(driver.own_variables(), driver.make_hosts)
        finally:
            if driver.hosts is not None:
                driver.hosts.release_all()
            cluster.disconnect()
