"""The keys of the store, relative to its root.

Every key is listed here once. docs/reference/store-layout.md describes their objects, and a test
compares the two.
"""

from __future__ import annotations

from typing import Self, overload

SCHEMA_VERSION = 2
"""Version of this layout and of plans. In version 1, a job's folder held those of its hosts."""
JOBS = "jobs"
REFS = "refs"
LISTED = "listed"
BLOBS = "blobs/sha256"
PACKS = "packs"
TREES = "trees"
EXECUTABLES = "executables"
DATA = "data"
BUCKET_FOLDERS = "bucket-folders"
GROUPS = "groups"
PROBES = "probes"
SESSIONS = "sessions"
SLICES_PIPE = "slices"
"""A pipe in a host's folder: a number written to it makes that simulated slice fail."""


class Key:
    """A key as a pattern; names in braces are attributes of the object that has the key. A pattern
    that ends with "/" is a prefix."""

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
    """Empty objects whose keys hold what lists of jobs show (see `_store.index`)."""
    prefix = Key("jobs/{job_id}/")
    plan = Key("jobs/{job_id}/plan.json")
    outcome = Key("jobs/{job_id}/outcome.json")
    """The verdict."""
    cancellation = Key("jobs/{job_id}/cancelled.json")
    """The record that a user cancelled a job on a cluster, a session or one of its calls, see
    `_store.cancellation`."""
    wait_note = Key("jobs/{job_id}/waiting.json")
    """The leader's reason for waiting, if the job does not run yet."""
    events = Key("jobs/{job_id}/events.jsonl")
    """Events of the gang, one JSON object per line."""
    compile_report = Key("jobs/{job_id}/compile-report.json")
    """The report of the real slice's compiler on the programs of the last attempt."""
    pathways = Key("jobs/{job_id}/pathways/")
    """Files that Pathways keeps for the job."""
    fetch = Key("jobs/{job_id}/local/fetching")
    """The source that a host of the local backend is downloading data from at the moment."""
    attempts = Key("jobs/{job_id}/attempts/")
    calls = Key("jobs/{job_id}/calls/")
    """The calls that wait for a session, and the one that runs, in order."""
    bell = Key("jobs/{job_id}/local/bell")
    """A pipe: writing to it wakes the leader of a session on this machine."""
    bell_port = Key("jobs/{job_id}/bell.json")
    """The port on which the leader of a session in a pod listens for callers."""
    outputs = Key("outputs/{job_id}/")
    """The default folder for files of the function."""

    def call(self, submitted_ns: int, call_id: str) -> str:
        """Return the key of a call in the session's queue; keys sort in the order of calls."""
        return f"{self.calls}/{submitted_ns:020d}-{call_id}"

    @staticmethod
    def call_id_of(key: str) -> str:
        """Return the id of the call that has this key in a session's queue."""
        return key.rpartition("/")[2].partition("-")[2]


class AttemptKeys:
    """The keys of one attempt of a job; attempts count from 1."""

    def __init__(self, job_id: str, number: int) -> None:
        self.job_id, self.number = job_id, number

    prefix = Key("jobs/{job_id}/attempts/{number}/")
    outcome = Key("jobs/{job_id}/attempts/{number}/outcome.json")
    """The outcome of an attempt that was followed by another one. The outcome of the last attempt
    is the job's."""
    programs = Key("jobs/{job_id}/attempts/{number}/programs/")
    """Programs that JAX compiled on the leader, for the compiler of the real slice."""
    debugger = Key("jobs/{job_id}/attempts/{number}/debugger.json")
    """The address of a debug job's debugger."""
    stacks_wanted = Key("jobs/{job_id}/attempts/{number}/stacks-wanted.json")
    """A request for the stacks of all hosts, to a leader that callers cannot connect to."""
    stacks = Key("jobs/{job_id}/attempts/{number}/stacks.json")
    """The leader's answer to the last request."""
    activity_wanted = Key("jobs/{job_id}/attempts/{number}/activity-wanted.json")
    """A request for the activity of all hosts, to a leader that callers cannot connect to."""
    activity = Key("jobs/{job_id}/attempts/{number}/activity.json")
    """The leader's answer to the last request."""
    orders = Key("jobs/{job_id}/attempts/{number}/orders/")
    """Orders to a leader on Ray to act on its hosts: kill programs, or connect a port."""
    answers = Key("jobs/{job_id}/attempts/{number}/order-answers/")
    """The leader's answers to orders, until they are read."""

    def order(self, request_id: str) -> str:
        """Return the key of an order, which is removed when answered or given up."""
        return f"{self.orders}/{request_id}.json"

    def order_answer(self, request_id: str) -> str:
        """Return the key of the leader's answer to an order."""
        return f"{self.answers}/{request_id}.json"


class HostKeys:
    """The keys of one host in one attempt of a job."""

    def __init__(self, job_id: str, number: int, index: int) -> None:
        self.job_id, self.number, self.index = job_id, number, index

    prefix = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/")
    report = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/report.json")
    """The host's report on how it ended."""
    result = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/result.pkl")
    """The pickled value of the host."""
    error = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/error.pkl")
    """The pickled exception of the host."""
    log = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/log")
    """The host's output, as printed."""
    metrics = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/metrics")
    """Metrics of the host: rows of `kinetic.log`, and the host's own figures."""
    chip_logs = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/chip-logs/")
    """Logs that TPU chips left on the host, if the host failed (see `agent.chip_logs`)."""
    files = Key("jobs/{job_id}/attempts/{number}/hosts/{index}/files/")
    """Files that the function wrote into its work folder on the host."""


class GroupKeys:
    """The keys of one batch."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id

    prefix = Key("groups/{group_id}/")
    batch = Key("groups/{group_id}/batch.json")
    """The name of the batch and the number of its inputs."""
    refused = Key("groups/{group_id}/refused/")
    stop = Key("groups/{group_id}/stop.json")
    """The request to submit no more inputs."""
    owner = Key("groups/{group_id}/owner.json")
    """The process that submits the batch, rewritten every 30 s."""
    end = Key("groups/{group_id}/end.json")
    """The note that no more inputs will be submitted."""

    def refusal(self, index: int) -> str:
        """Return the key of the error that an input's submission raised."""
        return f"{self.refused}/{index}.json"


def job_of(key: str) -> str:
    """Return the id of the job whose record has this key; "" for other keys."""
    first, _, rest = key.partition("/")
    job_id, _, record = rest.partition("/")
    return job_id if first == JOBS and record else ""


def log_index(log_key: str) -> str:
    """Return the key of the index (times and streams) of a host's output or metrics."""
    return f"{log_key}.idx"


def blob(digest: str) -> str:
    """Return the key of the content with this SHA-256 (64 hex digits)."""
    return f"{BLOBS}/{digest[:2]}/{digest[2:]}"


def pack(digest: str) -> str:
    """Return the key of a pack: an object with many small source files and their tree's list."""
    return f"{PACKS}/{digest}"


def tree(digest: str) -> str:
    """Return the key of a source tree's record, which names the blobs and packs with the tree's
    content. The record is written after the content and deleted before it."""
    return f"{TREES}/{digest}"


def session(name: str) -> str:
    """Return the key of the record with the id of the last session of this name."""
    return f"{SESSIONS}/{name}.json"


def executable(runtime: str, digest: str) -> str:
    """Return the key of a program that JAX has compiled. `digest` is JAX's own name for the program
    in a compilation cache, `runtime` JAX's version and platform."""
    return f"{EXECUTABLES}/{runtime}/{digest}"


def data(digest: str) -> str:
    """Return the key of declared data with this digest, unpacked."""
    return f"{DATA}/{digest}"


def bucket_folder(uri: str) -> str:
    """Return the key of the folder that stands in for a bucket's writable folder (gs://...) on
    simulated slices."""
    bucket, _, path = uri.partition("://")[2].partition("/")
    return "/".join(filter(None, (BUCKET_FOLDERS, bucket, path.strip("/"))))
