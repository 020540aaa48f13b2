"""Where everything of a job lies in the store: keys relative to the store's root.

In: ids and indices. Out: keys with "/" between parts. Called by everything that reads or writes the store.

    blobs/sha256/<2 hex>/<62 hex>         content-addressed: payloads, tree manifests, source files
    refs/<job_id>.json                    the reference: written first, deleted last
    jobs/<job_id>/plan.json
    jobs/<job_id>/outcome.json            written last, once
    jobs/<job_id>/result.pkl              the leader's value
    jobs/<job_id>/events.jsonl            what happened when
    jobs/<job_id>/hosts/<i>/report.json   how host i ended
    jobs/<job_id>/hosts/<i>/error.pkl     the exception it raised
    jobs/<job_id>/hosts/<i>/log           its output, as printed
    jobs/<job_id>/hosts/<i>/log.idx       when and on which stream (see logformat)
    outputs/<job_id>/                     default KINETIC_OUTPUT_DIR
"""

from __future__ import annotations

JOBS = "jobs"
REFS = "refs"
BLOBS = "blobs/sha256"


def blob(digest: str) -> str:
    """Key of the content with this SHA-256 (64 hex digits)."""
    return f"{BLOBS}/{digest[:2]}/{digest[2:]}"


def job(job_id: str) -> str:
    """Prefix of all that belongs to the job."""
    return f"{JOBS}/{job_id}"


def ref(job_id: str) -> str:
    """The reference. All references lie together, so that jobs are listed without walking their folders."""
    return f"{REFS}/{job_id}.json"


def plan(job_id: str) -> str:
    """The plan."""
    return f"{job(job_id)}/plan.json"


def outcome(job_id: str) -> str:
    """The verdict."""
    return f"{job(job_id)}/outcome.json"


def result(job_id: str) -> str:
    """The pickled value of the leader."""
    return f"{job(job_id)}/result.pkl"


def events(job_id: str) -> str:
    """What happened when, one JSON object a line."""
    return f"{job(job_id)}/events.jsonl"


def host(job_id: str, index: int) -> str:
    """Prefix of all that belongs to one host."""
    return f"{job(job_id)}/hosts/{index}"


def report(job_id: str, index: int) -> str:
    """How the host ended."""
    return f"{host(job_id, index)}/report.json"


def error(job_id: str, index: int) -> str:
    """The pickled exception of the host."""
    return f"{host(job_id, index)}/error.pkl"


def log(job_id: str, index: int) -> str:
    """The host's output, as printed."""
    return f"{host(job_id, index)}/log"


def log_index(job_id: str, index: int) -> str:
    """Times and streams of the host's output."""
    return f"{host(job_id, index)}/log.idx"


def outputs(job_id: str) -> str:
    """Where the function leaves files by default."""
    return f"outputs/{job_id}"
