"""The beginning of a checkpointer, on all hosts at once: nobody else writes the folder, all hosts
see the same one.

In: folders, the hosts. Out: `Opened`, or the same error on every host.
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
"""How long hosts may wait for each other; a host that is lost ends the job much sooner."""
_SHARED_WITHIN_S = 5.0
"""How long a file of the leader may take to be seen by the others."""
_IN_TRAINING = "/"
ECHOES = ("JaxRuntimeError", "XlaRuntimeError")
"""What a host meets whose peer is lost: nothing more can be committed together, and the gang tells
why."""
unclosed: dict[object, Callable[[], object]] = {}
"""How to wait for each checkpointer of a job that is open. Where the function returns and nobody
closes it, what it has saved is committed all the same, and its error is told."""
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CheckpointInUse, CheckpointMismatch)}
_ATTRIBUTES = ("job_id", "step")


@dataclass(frozen=True)
class Opened:
    """What a checkpointer works with.

    Attributes:
        lease: held by the leader; on other hosts None.
        writer: marks what this run writes: its training, and the run.
        persistent: the persistent tier; a guest where the folder is of another program.
        local: the local tier; None where there is none.
        verify: whether digests are kept and checked.
    """

    lease: Lease | None
    writer: str
    persistent: Persistent | Guest
    local: LocalTier | None
    verify: bool = True


def exchange(peers: Peers, name: str, text: str) -> list[str]:
    """Return what each host said under this name, which is used once; collective."""
    peers.set(f"{name}/{peers.index}", text)
    peers.wait_at_barrier(name, LIMIT_S)
    texts = peers.get_all(name)
    return [texts[str(index)] for index in range(peers.count)]


def agree(peers: Peers, name: str, act: Callable[[], str]) -> list[str]:
    """Let every host act, and return what each answers; collective.

    Raises:
        KineticError: of the first host that failed, on all hosts.
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
    """Open both tiers; collective.

    Args:
        directory: of the persistent tier.
        local: of the local tier on this host; None for none.
        keep: which persistent checkpoints stay.
        peers: the hosts.
        verify: keep and check digests.
        warn: called where digests cannot be made.

    Raises:
        CheckpointInUse: another job writes there.
        CheckpointError: a folder cannot be used.
    """
    if verify and not digests.is_available():
        verify = False
        warn(
            "Without the package xxhash on the hosts, damage to a checkpoint may go unnoticed: "
            "install it there, or say verify=False."
        )
    token = os.urandom(8).hex()
    held: list[Lease] = []

    def own() -> str:
        if peers.index == 0:
            if foreign.is_foreign(directory):  # Nothing is written into it, not even our name.
                return ""
            held.append(_take_lease(directory, token))
            training = "" if local is None else _identify_training(directory)
            return f"{training}{_IN_TRAINING}{token}"
        return token

    try:
        writer = agree(peers, "owner", own)[0]
        if not writer:
            return Opened(None, token, Guest(directory), None)
        tier = None if local is None else LocalTier(local, verify=verify)

        def look() -> str:
            if peers.index > 0:
                _check_shared(directory, writer.rpartition(_IN_TRAINING)[2])
            if tier is None:
                return ""
            tier.open()
            return ""

        agree(peers, "folders", look)
        persistent = Persistent(directory, keep, peers.index)
    except BaseException:
        for lease in held:
            lease.release()
        raise
    return Opened(held[0] if held else None, writer, persistent, tier, verify)


def _take_lease(directory: str, token: str) -> Lease:
    me = Owner(slices.job_id(), token, os.getpid(), socket.gethostname())
    held = Lease(lease.open_record(directory), f"folder of checkpoints {directory}", me)
    before = held.acquire()
    if before is not None and before.job_id != me.job_id:
        _log.info("%s has left the folder of checkpoints %s without a word", before, directory)
    return held


def _identify_training(directory: str) -> str:
    try:
        return checkpoints.identify_training(directory)
    except OSError as error:
        raise CheckpointError(
            f"The folder of checkpoints {directory} cannot be written to: "
            f"{error.strerror or error}."
        ) from error


def _check_shared(directory: str, token: str) -> None:
    """Check that this host sees what the leader has written."""
    record = lease.open_record(directory)
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while True:
        owner, _ = record.read()
        if owner is not None and owner.token == token:
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"This host does not see what the leader writes to {directory}: the folder of "
                "checkpoints must be one that all hosts share. Give directory= or output_dir= a "
                "bucket, or a folder on a shared disk."
            )
        time.sleep(0.1)


def look(
    opened_: Opened, peers: Peers
) -> tuple[list[int], list[list[Local]], dict[tuple[int, int], str]]:
    """Return what there is, the same on all hosts: the steps of the persistent tier, what each host
    has in its memory, and what is wrong there, by host and step."""
    listings = exchange(peers, "steps", json.dumps(opened_.persistent.steps()))
    steps: list[int] = json.loads(listings[0])
    if opened_.local is None:
        return steps, [], {}
    committed, faults = opened_.local.look()
    training = opened_.writer.partition(_IN_TRAINING)[0]
    committed = [each for each in committed if each.writer.partition(_IN_TRAINING)[0] == training]
    own = {"found": [local.to_json() for local in committed], "faults": [*faults.items()]}
    packed = zlib.compress(json.dumps(own).encode(), 1)
    every = [json.loads(zlib.decompress(data)) for data in peers.gather(packed)]
    on_hosts = [[Local.from_json(each) for each in host["found"]] for host in every]
    return (
        steps,
        on_hosts,
        {(n, step): text for n, host in enumerate(every) for step, text in host["faults"]},
    )


def _wait_for_unclosed(returned: bool) -> None:
    """Wait for all of them, also where one has failed; what interrupts this may call it again."""
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
