"""The keys of the store, relative to its root.

In: ids and indices. Out: keys with "/" between parts.

    blobs/sha256/<2 hex>/<62 hex>         content-addressed: payloads, large source files
    packs/<digest>                        small source files and lists of folders, many in one
                                          (see _source.packs)
    pack-indexes/<digest>                 what a pack holds; written after it, deleted before it
    trees/<digest>                        which packs and large files a source tree is made of;
                                          written after them, deleted before them
    refs/<job_id>.json                    the reference: written first, deleted last
    listed/<job_id>/ref-<text>            in a store without a folder: what lists show of the job
    listed/<job_id>/end-<text>            and of its end, in the keys themselves (see _store.index)
    jobs/<job_id>/plan.json
    jobs/<job_id>/outcome.json            the verdict: written last, once
    jobs/<job_id>/cancelled.json          a request to end the job, where a cluster stops it
    jobs/<job_id>/waiting.json            what a job waits for, where its leader reserves machines
    jobs/<job_id>/events.jsonl            what happened when, in all attempts
    jobs/<job_id>/compile-report.json     with compile_check: what the real compiler said
    jobs/<job_id>/pathways/               scratch of Pathways, which runs a single controller's
                                          computations
    jobs/<job_id>/attempts/<n>/           the n-th start of the gang, from 1
        outcome.json                      its verdict; exists if and only if attempt n+1 has begun
        debugger.json                     where the debugger of a debug job listens
        stacks-wanted.json                a request for stacks that cannot reach the leader
        stacks.json                       the leader's answer to the last such request
        activity-wanted.json, activity.json   the same for what the hosts are doing
        kill-wanted.json, kill-answer.json    ... and to kill hosts, where only their leader can
        programs/                         what JAX compiled on the leader, with compile_check
        hosts/<i>/report.json             how host i ended
        hosts/<i>/result.pkl              its value: the leader's, or that of each host
        hosts/<i>/error.pkl               the exception it raised
        hosts/<i>/log                     its output, as printed
        hosts/<i>/log.idx                 when and on which stream (see log_format)
        hosts/<i>/log.d/<offset>          both, in segments, in a store without a folder
                                          (see _store.log_segments)
        hosts/<i>/metrics, metrics.idx, metrics.d/<offset>
                                          the same for what it has logged (see metric_format)
    groups/<group_id>/batch.json          a batch: written before its first job
    groups/<group_id>/jobs/<i>-<n>.json   the n-th try of input i, if its id was not known before
    groups/<group_id>/refused/<i>.json    why input i could not be submitted
    groups/<group_id>/stop.json           a request to submit nothing more
    groups/<group_id>/end.json            nothing more will be submitted
    outputs/<job_id>/                     default KINETIC_OUTPUT_DIR
    data/<digest>/                        declared data, unpacked once for all jobs of this machine
                                          (see _datasets.cached_copy)
    data/mountpoints.json                 empty folders made to mount data on; the last job removes
                                          them (see _host.agent.mountpoints)
    probes/<hex>                          what `kinetic doctor` writes and deletes
"""

from __future__ import annotations

SCHEMA_VERSION = 2
"""Of this layout and its plans. Version 1 had no attempts: hosts were in the job's folder."""
JOBS = "jobs"
REFS = "refs"
LISTED = "listed"
BLOBS = "blobs/sha256"
PACKS = "packs"
PACK_INDEXES = "pack-indexes"
TREES = "trees"
DATA = "data"
BUCKET_FOLDERS = "bucket-folders"
GROUPS = "groups"
PROBES = "probes"
SLICES_PIPE = "slices"
"""In a host's folder, where virtual slices may be lost: a pipe that takes the number of one."""


def blob(digest: str) -> str:
    """Key of the content with this SHA-256 (64 hex digits)."""
    return f"{BLOBS}/{digest[:2]}/{digest[2:]}"


def pack(digest: str) -> str:
    """Key of the pack with this name."""
    return f"{PACKS}/{digest}"


def pack_index(digest: str) -> str:
    """Key of the list of what the pack holds."""
    return f"{PACK_INDEXES}/{digest}"


def tree(digest: str) -> str:
    """Key of the parts of the source tree whose root list has this digest."""
    return f"{TREES}/{digest}"


def job(job_id: str) -> str:
    """Prefix of everything that belongs to the job."""
    return f"{JOBS}/{job_id}"


def current_fetch(job_id: str) -> str:
    """What a host of the local backend is fetching from a bucket or hub at this moment."""
    return f"{job(job_id)}/local/fetching"


def ref(job_id: str) -> str:
    """The reference. All references have one prefix, so that listing jobs walks no job folders."""
    return f"{REFS}/{job_id}.json"


def listing(job_id: str) -> str:
    """Prefix of what lists show of the job."""
    return f"{LISTED}/{job_id}"


def plan(job_id: str) -> str:
    """The plan."""
    return f"{job(job_id)}/plan.json"


def job_of(key: str) -> str:
    """Return the id of the job whose record this is; "" for other keys."""
    first, _, rest = key.partition("/")
    job_id, _, record = rest.partition("/")
    return job_id if first == JOBS and record else ""


def outcome(job_id: str) -> str:
    """The verdict."""
    return f"{job(job_id)}/outcome.json"


def cancellation(job_id: str) -> str:
    """The request to end a job that a cluster stops, see `_store.cancellation`."""
    return f"{job(job_id)}/cancelled.json"


def wait_note(job_id: str) -> str:
    """What the leader of a job that does not run yet waits for."""
    return f"{job(job_id)}/waiting.json"


def events(job_id: str) -> str:
    """What happened when, one JSON object per line."""
    return f"{job(job_id)}/events.jsonl"


def pathways(job_id: str) -> str:
    """Prefix of what Pathways keeps for the job."""
    return f"{job(job_id)}/pathways"


def attempts(job_id: str) -> str:
    """Prefix of everything that belongs to attempts."""
    return f"{job(job_id)}/attempts"


def attempt(job_id: str, number: int) -> str:
    """Prefix of everything that belongs to one attempt, from 1."""
    return f"{attempts(job_id)}/{number}"


def attempt_outcome(job_id: str, number: int) -> str:
    """The verdict on an attempt that was followed by another one. The verdict on the last attempt
    is the job's (`outcome`)."""
    return f"{attempt(job_id, number)}/outcome.json"


def programs(job_id: str, number: int) -> str:
    """Prefix of what JAX compiled on the leader, for the compiler of the real slice."""
    return f"{attempt(job_id, number)}/programs"


def compile_report(job_id: str) -> str:
    """What the compiler of the real slice said of the last attempt's programs."""
    return f"{JOBS}/{job_id}/compile-report.json"


def debugger(job_id: str, number: int) -> str:
    """Where the debugger of an attempt of a debug job listens."""
    return f"{attempt(job_id, number)}/debugger.json"


def stacks_wanted(job_id: str, number: int) -> str:
    """A request for the stacks of all hosts, to a leader that cannot be called."""
    return f"{attempt(job_id, number)}/stacks-wanted.json"


def stacks(job_id: str, number: int) -> str:
    """The leader's answer to the last request."""
    return f"{attempt(job_id, number)}/stacks.json"


def activity_wanted(job_id: str, number: int) -> str:
    """A request for what all hosts are doing, to a leader that cannot be called."""
    return f"{attempt(job_id, number)}/activity-wanted.json"


def activity(job_id: str, number: int) -> str:
    """The leader's answer to the last request."""
    return f"{attempt(job_id, number)}/activity.json"


def orders(job_id: str, number: int) -> str:
    """Prefix of what the leader that has started the hosts is to do on them: to kill some on
    purpose, or to bring a port of one to a tunnel."""
    return f"{attempt(job_id, number)}/orders"


def order(job_id: str, number: int, request_id: str) -> str:
    """One order; it is removed when it is answered, or nobody waits for it any more."""
    return f"{orders(job_id, number)}/{request_id}.json"


def order_answer(job_id: str, number: int, request_id: str) -> str:
    """The leader's answer to an order, until it is read."""
    return f"{attempt(job_id, number)}/order-answers/{request_id}.json"


def tunnel(job_id: str, number: int, request_id: str) -> str:
    """Prefix of a connection to a port of a host, while it is open."""
    return f"{attempt(job_id, number)}/tunnels/{request_id}"


def host(job_id: str, number: int, index: int) -> str:
    """Prefix of everything that belongs to one host in one attempt."""
    return f"{attempt(job_id, number)}/hosts/{index}"


def report(job_id: str, number: int, index: int) -> str:
    """How the host ended."""
    return f"{host(job_id, number, index)}/report.json"


def result(job_id: str, number: int, index: int) -> str:
    """The pickled value of the host."""
    return f"{host(job_id, number, index)}/result.pkl"


def error(job_id: str, number: int, index: int) -> str:
    """The pickled exception of the host."""
    return f"{host(job_id, number, index)}/error.pkl"


def log(job_id: str, number: int, index: int) -> str:
    """The host's output, as printed."""
    return f"{host(job_id, number, index)}/log"


def log_index(log_key: str) -> str:
    """Times and streams of a host's output, or of what it has logged."""
    return f"{log_key}.idx"


def metrics(job_id: str, number: int, index: int) -> str:
    """What the host has logged with `kinetic.log`, and its own figures."""
    return f"{host(job_id, number, index)}/metrics"


def group(group_id: str) -> str:
    """Prefix of everything that belongs to the batch itself."""
    return f"{GROUPS}/{group_id}"


def batch(group_id: str) -> str:
    """What the batch is: the number of its inputs, the ids of its jobs."""
    return f"{group(group_id)}/batch.json"


def group_job(group_id: str, index: int, attempt: int) -> str:
    """The job of one try (from 1) of one input."""
    return f"{group(group_id)}/jobs/{index}-{attempt}.json"


def refusal(group_id: str, index: int) -> str:
    """Why an input could not be submitted."""
    return f"{group(group_id)}/refused/{index}.json"


def group_stop(group_id: str) -> str:
    """Exists when nothing more is to be submitted."""
    return f"{group(group_id)}/stop.json"


def group_owner(group_id: str) -> str:
    """Who submits: locked while it lives; counted up in a store without locks."""
    return f"{group(group_id)}/owner/owner.json"


def group_end(group_id: str) -> str:
    """Exists when nothing more will be submitted."""
    return f"{group(group_id)}/end.json"


def data(digest: str) -> str:
    """Declared data with this digest, unpacked."""
    return f"{DATA}/{digest}"


def bucket_folder(uri: str) -> str:
    """What stands in for a writable folder of a bucket (gs://...) where slices are simulated."""
    bucket, _, path = uri.partition("://")[2].partition("/")
    return "/".join(filter(None, (BUCKET_FOLDERS, bucket, path.strip("/"))))


def outputs(job_id: str) -> str:
    """Where the function leaves files by default."""
    return f"outputs/{job_id}"
