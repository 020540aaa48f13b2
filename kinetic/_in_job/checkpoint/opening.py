"""Opening a checkpointer on all hosts at once.

Afterwards this job alone writes the folder, and all hosts see the same folder. An error of one host
is raised on every host.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._host.worker import worlds
from kinetic._in_job import slices
from kinetic._in_job.checkpoint import digests, foreign
from kinetic._in_job.checkpoint.foreign import Guest
from kinetic._in_job.checkpoint.keeping import Keep
from kinetic._in_job.checkpoint.local_tier import LocalTier
from kinetic._in_job.checkpoint.persistent import Persistent
from kinetic._in_job.checkpoint.pieces import Local
from kinetic._in_job.peers import Peers
from kinetic._store import checkpoints, lease
from kinetic._store.lease import Lease, Owner
from kinetic.errors import CheckpointError, CheckpointInUse, CheckpointMismatch, KineticError

_log = logging.getLogger(__name__)
LIMIT_S = 600.0
"""Seconds for which hosts wait for each other. If a host is lost, the attempt ends much sooner."""
_SHARED_WITHIN_S = 5.0
"""A file that host 0 has written must be visible to all hosts within this many seconds."""
_IN_TRAINING = "/"
ECHOES = ("JaxRuntimeError", "XlaRuntimeError")
"""Types of errors that are only consequences: another host was lost, which the leader reports."""
unclosed: dict[object, Callable[[], object]] = {}
"""The `wait` method of each open checkpointer in a job. It is called when the function ends without
closing the checkpointer: saves are then committed, and their errors raised."""
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CheckpointInUse, CheckpointMismatch)}
_ATTRIBUTES = ("job_id", "step")


@dataclass(frozen=True)
class Opened:
    """The open tiers of a checkpointer.

    Attributes:
        lease: Lease on the folder, on host 0; None on other hosts.
        writer: Id of the training run and of this opening; stored in each local checkpoint.
        persistent: The persistent tier; a `Guest` if the folder belongs to another program.
        local: The local tier, or None.
        verify: True if digests are stored and checked.
    """

    lease: Lease | None
    writer: str
    persistent: Persistent | Guest
    local: LocalTier | None
    verify: bool = True


def exchange(peers: Peers, name: str, text: str) -> list[str]:
    """Send `text` to all hosts and return all hosts' texts, by index. All hosts must call this,
    with a `name` that was never used before."""
    peers.set(f"{name}/{peers.index}", text)
    peers.wait_at_barrier(name, LIMIT_S)
    texts = peers.get_all(name)
    return [texts[str(index)] for index in range(peers.count)]


def agree(peers: Peers, name: str, act: Callable[[], str]) -> list[str]:
    """Call `act` on every host and return all hosts' results, by index. All hosts must call this,
    with a `name` that was never used before.

    Raises:
        KineticError: `act` failed on a host. All hosts raise the error of the first such host.
    """
    failed: KineticError | None = None
    try:
        answer: dict[str, Any] = {"said": act()}
    except KineticError as error:
        failed = error
        about = {name: value for name, value in vars(error).items() if name in _ATTRIBUTES}
        answer = {"failed": type(error).__name__, "why": str(error), "about": about}
    answers = [json.loads(reply) for reply in exchange(peers, name, json.dumps(answer))]
    for host, reply in enumerate(answers):
        if "failed" not in reply:
            continue
        if failed is not None and host == peers.index:
            raise failed
        kind = _KINDS.get(reply["failed"], CheckpointError)
        raised = kind(f"Host {host}: {reply['why']}")
        vars(raised).update(reply["about"])
        raise raised
    return [reply["said"] for reply in answers]


def open_checkpoints(
    directory: str,
    local: Path | None,
    keep: Keep,
    peers: Peers,
    *,
    verify: bool,
    warn: Callable[[str], None],
) -> Opened:
    """Open both tiers. All hosts must call this.

    Args:
        directory: Path or URI of the persistent tier.
        local: Folder of the local tier on this host; None for none.
        keep: The persistent checkpoints to keep.
        peers: The hosts.
        verify: Store and check digests.
        warn: Prints a warning if digests cannot be computed.

    Raises:
        CheckpointInUse: Another job writes to the folder.
        CheckpointError: A folder cannot be used.
    """
    if verify and not digests.is_available():
        verify = False
        warn(
            "The package xxhash is not installed on the hosts, so damage to a checkpoint may go "
            "unnoticed. Install it there, or set verify=False to do without the check."
        )
    token = os.urandom(8).hex()
    leases: list[Lease] = []

    def acquire() -> str:
        if peers.index == 0:
            if foreign.is_foreign(directory):  # Write nothing into it, not even a lease.
                return ""
            leases.append(_take_lease(directory, token))
            training = "" if local is None else _identify_training(directory)
            return f"{training}{_IN_TRAINING}{token}"
        return token

    try:
        writer = agree(peers, "owner", acquire)[0]
        if not writer:
            return Opened(None, token, Guest(directory), None)
        tier = None if local is None else LocalTier(local, verify=verify)

        def open_folders() -> str:
            if peers.index > 0:
                _check_shared(directory, writer.rpartition(_IN_TRAINING)[2])
            if tier is None:
                return ""
            tier.open()
            return ""

        agree(peers, "folders", open_folders)
        persistent = Persistent(directory, keep, peers.index)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return Opened(leases[0] if leases else None, writer, persistent, tier, verify)


def _take_lease(directory: str, token: str) -> Lease:
    me = Owner(slices.job_id(), token, os.getpid(), socket.gethostname())
    acquired = Lease(lease.open_record(directory), f"folder of checkpoints {directory}", me)
    before = acquired.acquire()
    if before is not None and before.job_id != me.job_id:
        _log.info("%s ended without releasing the folder of checkpoints %s", before, directory)
    return acquired


def _identify_training(directory: str) -> str:
    try:
        return checkpoints.identify_training(directory)
    except OSError as error:
        raise CheckpointError(
            f"The folder of checkpoints {directory} cannot be written to: "
            f"{error.strerror or error}. Set directory= to a folder that this host can write to."
        ) from error


def _check_shared(directory: str, token: str) -> None:
    """Check that this host sees the lease with this token, which host 0 has written.

    Raises:
        CheckpointError: The folder is not shared between hosts.
    """
    record = lease.open_record(directory)
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while True:
        owner, _ = record.read()
        if owner is not None and owner.token == token:
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"This host does not see what host 0 writes to {directory}: all hosts must share "
                "the folder of checkpoints. Set directory= or output_dir= to a bucket, or to a "
                "folder on a shared disk."
            )
        time.sleep(0.1)


def list_checkpoints(
    opened_: Opened, peers: Peers
) -> tuple[list[int], list[list[Local]], dict[tuple[int, int], str]]:
    """List the checkpoints in both tiers. All hosts must call this, and get the same lists.

    Returns:
        The steps of the persistent tier, the local checkpoints of each host, and why damaged local
            checkpoints cannot be read, by (host, step).
    """
    listings = exchange(peers, "steps", json.dumps(opened_.persistent.steps()))
    steps: list[int] = json.loads(listings[0])
    if opened_.local is None:
        return steps, [], {}
    committed, faults = opened_.local.read_steps()
    training = opened_.writer.partition(_IN_TRAINING)[0]
    committed = [own for own in committed if own.writer.partition(_IN_TRAINING)[0] == training]
    listing = {"found": [local.to_json() for local in committed], "faults": [*faults.items()]}
    packed = zlib.compress(json.dumps(listing).encode(), 1)
    hosts = [json.loads(zlib.decompress(data)) for data in peers.gather(packed)]
    on_hosts = [[Local.from_json(record) for record in host["found"]] for host in hosts]
    return (
        steps,
        on_hosts,
        {(n, step): text for n, host in enumerate(hosts) for step, text in host["faults"]},
    )


def _wait_for_unclosed(returned: bool) -> None:
    """If the function has returned, wait for all open checkpointers, even if one of them fails;
    then raise the first error. After an interruption by a signal this function may be called
    again."""
    failed: list[KineticError] = []
    for checkpointer, wait in list(unclosed.items()):
        try:
            if returned:
                wait()
        except KineticError as error:
            failed.append(error)
        except Exception as error:
            if type(error).__name__ not in ECHOES:
                raise
        unclosed.pop(checkpointer, None)
    if failed:
        raise failed[0]


worlds.on_end(_wait_for_unclosed)
