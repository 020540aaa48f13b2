"""Step 3, submit: preflight, image, documents, missing blobs, plan, reference, then the job itself.

These are the only writes before the job runs. Their order ensures that a crash at any point leaves
either no job, or a job with a reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kinetic._backends.base import Backend, BuildsImages, phase_of
from kinetic._client import planning
from kinetic._client.board import console, sending
from kinetic._client.planning import Planned, Target
from kinetic._core import layout
from kinetic._core.options import Options
from kinetic._core.plan import BUCKETS, HUB, Plan, Tree
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store import index, many
from kinetic._store.base import Store
from kinetic._store.gc_lock import lock_for_submission
from kinetic.errors import BackendUnavailable, KineticError, SubmitError

_log = logging.getLogger("kinetic.submission")
TAKE_BACK_S = 30.0
"""Longest wait in seconds for a job to stop after its submission was interrupted."""


def submit(
    planned: Planned,
    backend: Backend,
    store: Store,
    secrets: Mapping[str, str] | None = None,
    *,
    on_sent: Callable[[Planned], None] | None = None,
) -> JobRef:
    """Create a job and return its reference. `on_sent` is called with the plan that was sent; it
    differs from `planned` if files changed after planning.

    Promises: (1) all checks come before the first write; (2) the reference is written before the
    job is created, so that every job can be found; (3) on failure, the job's records are removed,
    the reference last, unless a backend that does not answer may have created the job; (4) Ctrl-C
    removes the job completely, or prints that it may be running. Content-addressed blobs may stay:
    other jobs may share them.

    Raises:
        BackendUnavailable: the backend does not answer.
        PreflightError: the backend cannot take the job now.
        StoreError: the store is full or cannot be written.
        SubmitError: the backend could not create the job.
    """
    plan, values = planned.plan, planned.secrets if secrets is None else secrets
    backend.preflight(plan)
    _check_distant(plan, values)
    plan = with_image(plan, planned.installed, backend)
    planned, documents = dataclasses.replace(planned, plan=plan), backend.render(plan)
    ref = ref_of(plan, store.uri)
    with contextlib.ExitStack() as guard:
        # The lock keeps garbage collection from removing blobs before a plan names them, and the
        # plan before its reference exists.
        with lock_for_submission(store):
            with sending.show_progress(store, _most_bytes(planned)) as watched:
                planned = _send_content(planned, watched)
            if on_sent is not None:
                on_sent(planned)
            if planned.plan is not plan:  # Files have changed since planning.
                plan, documents = planned.plan, backend.render(planned.plan)
            guard.push(functools.partial(_undo, ref, backend, store))
            if not store.put(
                layout.JobKeys(plan.job_id).plan,
                json.dumps(plan.to_json(), indent=1).encode() + b"\n",
                if_absent=True,
            ):
                guard.pop_all()  # The records belong to an existing job with this id.
                raise SubmitError(
                    f"Another job already has the id {plan.job_id}. Submit again: each submission "
                    "has a new id."
                )
            index.add(store, ref)
        backend.submit(ref, documents, values)
    _log.info("submitted %s as %s", plan.name, plan.job_id)
    return ref


def plan_batch(
    func: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    options: Options,
    target: Target,
    name: str,
) -> Planned:
    """Plan what the calls of a batch share, including the image.

    Raises:
        PreflightError: the backend cannot run such jobs now, or their image cannot be built.
    """
    shared = planning.plan_function(
        func, calls, options, settings=target.settings, place=target.place, name=name
    )
    target.backend.preflight(shared.plan)
    plan = with_image(shared.plan, shared.installed, target.backend)
    return dataclasses.replace(shared, plan=plan)


def warn(target: Target, warnings: Sequence[str], output_dir: str | None) -> None:
    """Print the warnings of a submission, each once in a process. Mark the job's output folder, so
    that later calls do not send it with the source tree."""
    if output_dir is not None:
        from kinetic._source import outputs

        outputs.mark(output_dir)
    if target.notice:
        console.notice(target.notice)
    for warning in warnings:
        _warn_once(warning)


@functools.cache
def _warn_once(warning: str) -> None:
    logging.getLogger("kinetic").warning("kinetic: %s", warning)


def with_image(plan: Plan, installed: Mapping[str, bytes], backend: Backend) -> Plan:
    """Return the plan with the name of the hosts' image. Build the image if necessary.

    Raises:
        PreflightError: the image cannot be built.
        BackendUnavailable: the build service does not answer.
    """
    if not isinstance(backend, BuildsImages):
        return plan
    return backend.choose_image(plan, installed, lambda line: console.notice(f"kinetic: {line}"))


def _check_distant(plan: Plan, secrets: Mapping[str, str]) -> None:
    """Refuse data in buckets or on Hugging Face that does not exist or cannot be read."""
    for data in plan.data:
        if data.source.startswith(BUCKETS):
            if data.writable and not plan.place.is_cluster:
                continue  # A local folder stands in for the bucket.
            from kinetic._datasets import cloud

            cloud.check(data.source, is_dir=data.is_dir, may_be_empty=data.writable)
        elif data.source.startswith(HUB):
            token = secrets.get("HF_TOKEN", "")
            if plan.place.is_cluster and not token and plan.place.has_complete_image:
                continue  # The image may have its own token.
            from kinetic._datasets import hub

            is_anonymous = plan.place.is_cluster and not token
            hub.check(data.source, token=None if is_anonymous else token)


def ref_of(plan: Plan, store_uri: str) -> JobRef:
    """Return the reference of a planned job."""
    own_folder = f"{store_uri.rstrip('/')}/{layout.JobKeys(plan.job_id).outputs}"
    is_program = plan.options.joins_jax == "program"  # A file name may contain dots.
    return JobRef(
        job_id=plan.job_id,
        place=plan.place,
        accelerator=plan.topology.name,
        func_name=plan.name if is_program else plan.name.rpartition(".")[2],
        display_name=plan.name,
        created_at=plan.created_at,
        store_uri=store_uri,
        hosts=plan.hosts,
        group_id=plan.labels.get("group_id"),
        group_kind=plan.labels.get("group_kind"),
        group_index=int(plan.labels["group_index"]) if "group_index" in plan.labels else None,
        debug=plan.options.debug,
        has_single_controller=plan.has_single_controller,
        has_head=plan.has_head,
        session_name="" if plan.holds is None else plan.holds.name,
        output_dir=plan.output_dir or own_folder,
    )


def _most_bytes(planned: Planned) -> int:
    """Return the size of the payload and all files: the most that may have to be sent."""
    bundles = [bundle for _, bundle in planned.data]
    if planned.bundle is not None:
        bundles.append(planned.bundle)
    return len(planned.payload) + sum(bundle.tree.size_bytes for bundle in bundles)


def _send_content(planned: Planned, store: Store) -> Planned:
    """Send the content that the plan names. Return the plan that was sent: its source trees may
    have changed since planning."""
    source, data = planned.bundle, planned.data
    sent_trees: dict[Tree, Tree] = {}
    if source is not None:
        from kinetic._source.upload import upload

        sent = upload(source, store)
        _log.info("sent %d of %d files, %d bytes", sent.files, source.tree.files, sent.size_bytes)
        if sent.changed is not None:
            sent_trees[source.tree] = sent.changed.tree
            planned = dataclasses.replace(planned, bundle=sent.changed)
    if data:
        from kinetic._datasets import call_data

        size_bytes, changed = call_data.send(data, store)
        _log.info("sent %d bytes of data", size_bytes)
        sent_trees |= changed
    if planned.installed:
        _send(planned.installed, store)
    if planned.plan.function is not None:
        own = {planned.plan.function.digest: planned.function}
        key, parts = layout.blob(planned.plan.payload.digest), [planned.payload]
        # The arguments of a batch's call are rarely in the store: send them without checking.
        sends: list[Callable[[], object]] = [lambda: _send(own, store)]
        sends.append(lambda: many.put_content(store, key, parts))
        many.at_once(lambda send: send(), sends, store.calls_at_once)
    else:
        _send({planned.plan.payload.digest: planned.payload}, store)
    if not sent_trees:
        return planned
    return dataclasses.replace(planned, plan=_with_trees(planned.plan, sent_trees))


def _send(contents: Mapping[str, bytes], store: Store) -> None:
    """Send those contents (by digest) that the store lacks; protect the others from pruning."""
    keys = {layout.blob(digest): data for digest, data in contents.items()}
    existing = many.renew_many(store, keys)
    absent = {key: data for key, data in keys.items() if key not in existing}
    many.put_many(store, absent, if_absent=True)


def _with_trees(plan: Plan, sent_trees: Mapping[Tree, Tree]) -> Plan:
    def sent_tree(tree: Tree | None) -> Tree | None:
        return None if tree is None else sent_trees.get(tree, tree)

    data = tuple(dataclasses.replace(each, tree=sent_tree(each.tree)) for each in plan.data)
    return dataclasses.replace(plan, tree=sent_tree(plan.tree), data=data)


def _undo(ref: JobRef, backend: Backend, store: Store, *raised: Any) -> None:
    """Exit callback of a submission: after an exception, remove everything written for the job."""
    error = raised[1]
    if error is None:
        return
    # Ctrl-C, or an exception of a signal handler: the job may have been created.
    if isinstance(error, TimeoutError) or not isinstance(error, KineticError | OSError):
        take_back(ref, backend, store, error)
        return
    if isinstance(error, BackendUnavailable):  # The job may have been created.
        try:
            backend.cancel(ref)
        except BackendUnavailable:
            raise BackendUnavailable(
                f"The backend failed while it created {ref.job_id}, and parts of the job may "
                "exist. When the backend answers again, remove them with `kinetic jobs cleanup "
                f"{ref.job_id}`. The error: {error}"
            ) from error
    _remove(store, ref.job_id)
    if not isinstance(error, KineticError):
        raise SubmitError(
            f"{ref.job_id} could not be created, and its records were removed. Submit it again. "
            f"The error: {error}"
        ) from error


def take_back(ref: JobRef, backend: Backend, store: Store, interrupt: BaseException) -> None:
    """Remove a job whose submission was interrupted, and say so in the last line on stderr. If the
    job does not stop soon or its backend does not answer, say instead that it may be running."""
    job_id = ref.job_id
    words = (
        f"kinetic: the submission of {job_id} was interrupted, but the job may be running: "
        f"`kinetic jobs cleanup {job_id}` stops and removes it."
    )
    try:
        _remove_all(ref, backend, store)
        words = f"kinetic: the submission of {job_id} was interrupted, and the job was removed."
    except (KineticError, OSError) as error:
        _log.info("%s could not be removed: %s", job_id, error)
    finally:  # Also after a second Ctrl-C.
        if isinstance(interrupt, KeyboardInterrupt):
            console.print_last(interrupt, words)
        else:
            console.notice(words)


def _remove_all(ref: JobRef, backend: Backend, store: Store) -> None:
    backend.cancel(ref)
    if phase_of(backend, ref) is JobStatus.NOT_FOUND:
        index.remove(store, ref.job_id)
        return
    from kinetic._client.handle import JobHandle

    console.notice(f"\nkinetic: {ref.job_id} was already submitted; stopping it ...")
    JobHandle(ref, backend, store).cleanup(cleanup_timeout=TAKE_BACK_S)


def _remove(store: Store, job_id: str) -> None:
    """Remove a job's records. If the store fails, the reference remains, so that the records can be
    found and removed later."""
    try:
        index.remove(store, job_id)
    except KineticError as error:
        _log.warning(
            "%s could not be created, and its records could not be removed; `kinetic jobs cleanup "
            "%s` removes them. The error: %s",
            job_id,
            job_id,
            error,
        )
