"""Uses of the public names, for a type checker. test_typing checks them; they never run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, assert_type

import kinetic
from kinetic import BatchHandle, JobHandle, RemoteCallable
from kinetic.job_status import JobStatus


@kinetic.run(accelerator="tpu-v6e-16", timeout=60, env={"A": "1"})
def train(steps: int, *, rate: float = 0.1) -> str:
    return "x" * steps


@kinetic.run()
async def fetch(url: str) -> bytes:
    return url.encode()


class Trainer:
    @kinetic.run("cpu")
    def fit(self, steps: int) -> float:
        return float(steps)


assert_type(train(1, rate=0.5), str)
assert_type(train.run_async(1), JobHandle[str])
assert_type(train.run_async(1).result(), str)
assert_type(train.run_async(1).status(), JobStatus)
assert_type(train.local(1), str)
assert_type(fetch("a"), bytes)
assert_type(fetch.run_async("a").result(timeout=3), bytes)
assert_type(Trainer().fit(3), float)
assert_type(Trainer().fit.run_async(3).result(), float)
assert_type(kinetic.attach("job-1").result(), Any)
assert_type(kinetic.attach("job-1").job_id, str)
assert_type([h.job_id for h in kinetic.list_jobs()], list[str])
assert_type(kinetic.run("cpu")(len)([1]), int)


assert_type(train.with_options(accelerator="cpu", timeout="1h", env={"A": "2"})(1), str)
assert_type(Trainer().fit.with_options(timeout=timedelta(hours=1), retries=1)(3), float)
kinetic.run("cpu", timeout="1h30m", start_timeout=timedelta(minutes=5), hang_timeout=90)
train.run_async(1).result(timeout="90s")


T = TypeVar("T")


@kinetic.run()
def first(items: Sequence[T]) -> T:
    return items[0]


@kinetic.run()
async def same(value: T) -> T:
    return value


class Kinds:
    @classmethod
    @kinetic.run("cpu")
    def made(cls, steps: int) -> float:
        return float(steps)

    @staticmethod
    @kinetic.run("cpu")
    def free(steps: int) -> float:
        return float(steps)

    @kinetic.run("cpu")
    async def later(self, steps: int) -> float:
        return float(steps)

    @kinetic.run("cpu")
    def any(self, value: T) -> T:
        return value


assert_type(first([1]), int)
assert_type(first.run_async(["a"]).result(), str)
assert_type(same("a"), str)
assert_type(same.run_async(1).result(), int)
assert_type(Kinds.made(3), float)
assert_type(Kinds().made(3), float)
assert_type(Kinds.made.run_async(3).result(), float)
assert_type(Kinds.free(3), float)
assert_type(Kinds.free.run_async(3).result(), float)
assert_type(Kinds().later(3), float)
assert_type(Kinds().later.run_async(3).result(), float)
assert_type(Kinds.later(Kinds(), 3), float)
assert_type(Kinds().any("a"), str)
assert_type(fetch.local("a"), bytes)
assert_type(fetch.with_options(timeout=3)("a"), bytes)
fetch(kinetic.Data("images", fuse=True))
fetch.run_async(url=kinetic.Data("images"))

assert_type(train.run_async_map([1, 2]).results(), list[str])
assert_type(
    fetch.run_async_map(["a"], max_concurrent="auto", name="all").results(timeout="1h"), list[bytes]
)
assert_type(train.run_async_map([1, 2]).results(return_exceptions=True), list[str | BaseException])
assert_type(
    [job.result() for job in train.run_async_map([1, 2], max_concurrent=None).as_completed()],
    list[str],
)
assert_type([job.result() for job in train.run_async_map([1]).failures()], list[str])
assert_type(kinetic.attach_batch("grp-1").results(), list[Any])
assert_type(kinetic.collections.map(train, [1]), BatchHandle[str])
assert_type(kinetic.collections.map(fetch, ["a"], retries=1), BatchHandle[bytes])
assert_type(kinetic.collections.map(train.run_async, [1]), BatchHandle[str])

assert_type(train.with_options(all_hosts=True).run_async(1).results(), list[str])
assert_type(train.run_async(1).logs(), str)
assert_type(train.run_async(1).logs(all_hosts=True, tail=3), str)
train.run_async(1).logs(follow=True)


def takes_object(handle: JobHandle[object]) -> None: ...


takes_object(train.run_async(1))  # A handle of str is a handle of object.
text: str = kinetic.__version__


def raises() -> None:
    try:
        train(1)
    except kinetic.errors.JobFailed as error:
        assert_type(error.hosts, tuple[int, ...])


def takes_callable(func: RemoteCallable[[int], float]) -> None: ...


takes_callable(Trainer().fit)


async def awaits() -> None:
    assert_type(await train.aio(1, rate=0.5), str)
    assert_type(await fetch.aio("a"), bytes)
    assert_type(await Trainer().fit.aio(3), float)
    assert_type(await train.run_async(1), str)


job = train.run_async(1)
assert_type(job.exception(timeout="5s"), BaseException | None)
assert_type(job.done(), bool)
job.add_done_callback(lambda handle: print(handle.result().upper()))
for each in kinetic.as_completed([job, train.run_async(2)], timeout="1m"):
    assert_type(each.result(), str)
