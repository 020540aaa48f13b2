"""The keys of the store, relative to its root.

Every key is listed here once; docs/reference/store-layout.md says what lies there, and a test
compares the two.
"""

from __future__ import annotations

from typing import Self, overload

SCHEMA_VERSION = 2
"""Of this layout and its plans. Version 1 had no attempts: hosts were in the job's folder."""
JOBS = "jobs"
REFS = "refs"
LISTED = "listed"
BLOBS = "blobs/sha256"
PACKS = "packs"
TREES = "trees"
DATA = "data"
BUCKET_FOLDERS = "bucket-folders"
GROUPS = "groups"
PROBES = "probes"
SLICES_PIPE = "slices"
"""In a host's folder, where virtual slices may be lost: a pipe that takes the number of one."""


class Key:
    """A key, with the attributes of its owner in braces. A pattern that ends with "/" stands for a
    prefix."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    @overload
    def __get__(self, keys: None, owner: type) -> Self: ...

    @overload
    def __get__(self, keys: object, owner: type) -> str: ...

    def __get__(self, keys: object, owner: type) -> Self | str:
        return self if keys is None else self.pattern.rstrip("/").format_map(vars(keys))


class JobKeys:
    """The keys of one job."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id

    ref = Key("refs/{job_id}.json")
    """The reference. All references have one prefix, so that listing jobs walks no job folders."""
    listing = Key("listed/{job_id}/")
    """What lists show of the job, in the keys themselves (see `_store.index`)."""
    prefix = Key("jobs/{job_id}/")
    plan = Key("jobs/{job_id}/plan.json")
    outcome = Key("jobs/{job_id}/outcome.json")
    """The verdict."""
    cancellation = Key("jobs/{job_id}/cancelled.json")
    """The request to end a job that a cluster stops, see `_store.cancellation`."""
    wait_note = Key("jobs/{job_id}/waiting.json")
    """What the leader of a job that does not run yet waits for."""
    events = Key("jobs/{job_id}/events.jsonl")
    """What happened when, one JSON object per line."""
    compile_report = Key("jobs/{job_id}/compile-report.json")
    """What the compiler of the real slice said of the last attempt's programs."""
    pathways = Key("jobs/{job_id}/pathways/")
    """What Pathways keeps for the job."""
    fetch = Key("jobs/{job_id}/local/fetching")
    """What a host of the local backend is fetching from a bucket or hub at this moment."""
    attempts = Key("jobs/{job_id}/attempts/")
    outputs = Key("outputs/{job_id}/")
    """Where the function leaves files by default."""


class AttemptKeys:
    """The keys of one attempt of a job, from 1."""

    def __init__(self, job_id: str, number: int) -> None:
        self.job_id, self.number = job_id, number

    prefix = Key("jobs/{job_id}/attempts/{number}/")
    outcome = Key("jobs/{job_id}/attempts/{number}/outcome.json")
    """The verdict on an attempt that was followed by another one. The verdict on the last attempt
    is the job's."""
    programs = Key("jobs/{job_id}/attempts/{number}/programs/")
    """What JAX compiled on the leader, for the compiler of the real slice."""
    debugger = Key("jobs/{job_id}/attempts/{number}/debugger.json")
    """Where the debugger of a debug job listens."""
    stacks_wanted = Key("jobs/{job_id}/attempts/{number}/stacks-wanted.json")
    """A request for the stacks of all hosts, to a leader that cannot be called."""
    stacks = Key("jobs/{job_id}/attempts/{number}/stacks.json")
    """The leader's answer to the last request."""
    activity_wanted = Key("jobs/{job_id}/attempts/{number}/activity-wanted.json")
    """A request for what all hosts are doing, to a leader that cannot be called."""
    activity = Key("jobs/{job_id}/attempts/{number}/activity.json")
    """The leader's answer to the last request."""
    orders = Key("jobs/{job_id}/attempts/{number}/orders/")
    """What the leader that has started the hosts is to do on them."""
    answers = Key("jobs/{job_id}/attempts/{number}/order-answers/")
    """The leader's answers to orders, until they are read."""

    def order(self, request_id: str) -> str:
        """One order; it is removed when it is answered, or nobody waits for it any more."""
        return f"{self.orders}/{request_id}.json"

    def order_answer(self, request_id: str) -> str:
        """The leader's answer to an order."""
        return f"{self.answers}/{request_id}.json"


class HostKeys:
    """The keys of one host in one attempt of a job."""

    def __init__(self, job_id: str, number: int, index: int) -> None:
        self.job_id, self.number, self.index = job_id, number, index

    prefix = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/")
    report = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/report.json")
    """How the host ended."""
    result = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/result.pkl")
    """The pickled value of the host."""
    error = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/error.pkl")
    """The pickled exception of the host."""
    log = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/log")
    """The host's output, as printed."""
    metrics = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/metrics")
    """What the host has logged with `kinetic.log`, and its own figures."""
    files = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/files/")
    """What the function wrote into its work folder there."""


class GroupKeys:
    """The keys of one batch."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id

    prefix = Key("groups/{group_id}/")
    batch = Key("groups/{group_id}/batch.json")
    """What the batch is: the number of its inputs, its name."""
    refused = Key("groups/{group_id}/refused/")
    stop = Key("groups/{group_id}/stop.json")
    """Exists when nothing more is to be submitted."""
    owner = Key("groups/{group_id}/owner.json")
    """The process that submits, stamped every 30 s."""
    end = Key("groups/{group_id}/end.json")
    """Exists when nothing more will be submitted."""

    def refusal(self, index: int) -> str:
        """Why an input could not be submitted."""
        return f"{self.refused}/{index}.json"


def job_of(key: str) -> str:
    """Return the id of the job whose record this is; "" for other keys."""
    first, _, rest = key.partition("/")
    job_id, _, record = rest.partition("/")
    return job_id if first == JOBS and record else ""


def log_index(log_key: str) -> str:
    """Times and streams of a host's output, or of what it has logged."""
    return f"{log_key}.idx"


def blob(digest: str) -> str:
    """Key of the content with this SHA-256 (64 hex digits)."""
    return f"{BLOBS}/{digest[:2]}/{digest[2:]}"


def pack(digest: str) -> str:
    """Key of the pack with this name: small source files, many in one, and the list of a tree."""
    return f"{PACKS}/{digest}"


def tree(digest: str) -> str:
    """Key of the parts of the source tree whose list has this digest; written after them,
    deleted before them."""
    return f"{TREES}/{digest}"


def data(digest: str) -> str:
    """Declared data with this digest, unpacked."""
    return f"{DATA}/{digest}"


def bucket_folder(uri: str) -> str:
    """What stands in for a writable folder of a bucket (gs://...) where slices are simulated."""
    bucket, _, path = uri.partition("://")[2].partition("/")
    return "/".join(filter(None, (BUCKET_FOLDERS, bucket, path.strip("/"))))
