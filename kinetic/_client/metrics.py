"""Metrics that a job has logged with `kinetic.log`: readers that follow a growing log, and NumPy
arrays and a DataFrame for users. The format of the logs is that of `_core.metrics`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic._backends import attempt_logs
from kinetic._backends.base import LogRequest
from kinetic._core.log_format import LogChunk, Position
from kinetic._core.metrics import Recording, RowDecoder, Rows, Series
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic._store.base import Store
from kinetic.errors import PreflightError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RowsReader:
    """Reads the rows that hosts have logged since the last read. The `tail` of its `LogRequest`
    applies to the first read only."""

    def __init__(self, store: Store, ref: JobRef, request: LogRequest) -> None:
        self._store = store
        self._ref = ref
        self.request = request
        self._after: dict[int, Position] = {}
        self._decoders: dict[tuple[int, int], RowDecoder] = {}

    def read(self) -> Iterator[tuple[LogChunk, list[Rows]]]:
        """Yield each new chunk of a log, with the rows whose last byte is in it. Never waits.

        Raises:
            StoreError: the store does not answer.
        """
        request = self.request
        if self._after:
            request = replace(request, tail=None, after=dict(self._after))
        for chunk in attempt_logs.read(self._store, self._ref, request, has_ended=lambda: True):
            if chunk is not None:
                yield chunk, self.take(chunk)

    def take(self, chunk: LogChunk) -> list[Rows]:
        """Decode a chunk of a host's log; return the rows whose last byte is in this chunk."""
        self._after[chunk.host] = chunk.end
        decoder = self._decoders.setdefault((chunk.end.attempt, chunk.host), RowDecoder())
        return decoder.feed(chunk.data)


class MetricsReader(RowsReader):
    """Records the rows that hosts have logged. `hosts` and `attempt` choose the hosts and the
    attempt to read; None means all."""

    def __init__(
        self,
        store: Store,
        ref: JobRef,
        *,
        hosts: tuple[int, ...] | None = (0,),
        attempt: int | None = None,
    ) -> None:
        request = LogRequest(hosts=hosts, follow=False, attempt=attempt, metrics=True)
        super().__init__(store, ref, request)
        self.recording = Recording()

    def read_new(self) -> bool:
        """Record the rows logged since the last read; True if there were any. Does not wait.

        Raises:
            StoreError: the store does not answer.
        """
        self._ref.check_version()
        has_rows = [bool(parts) for _, parts in self.read()]
        return any(has_rows)

    def take(self, chunk: LogChunk) -> list[Rows]:
        """Record and return the rows whose last byte is in this chunk of a host's log."""
        parts = super().take(chunk)
        for rows in parts:
            self.recording.add(chunk.host, chunk.end.attempt, rows)
        return parts


@dataclass(frozen=True, repr=False)
class Metric:
    """One metric of one host, as arrays of equal length. NumPy treats it as the array `values`.

    Attributes:
        name: The name that was logged.
        host: The index of the host.
        steps: The steps of the values, in order; -1 for values without a step, such as measurements
            of the host.
        values: The logged numbers.
        times: When each value was logged, in seconds since the epoch.
        attempts: The number of the attempt that logged each value.

    Example:
        ```python
        loss = job.metrics()["loss"]
        plt.plot(loss.steps, loss.values)
        ```
    """

    name: str
    host: int
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    times: NDArray[np.float64]
    attempts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the values, for NumPy's functions."""
        return self.values.astype(dtype or self.values.dtype, copy=bool(copy))

    def __repr__(self) -> str:
        if not len(self):
            return f"<Metric {self.name!r} of host {self.host}: no values>"
        at = f" at step {self.steps[-1]}" if self.steps[-1] >= 0 else ""
        return (
            f"<Metric {self.name!r} of host {self.host}: {len(self)} values, the last is "
            f"{self.values[-1]:g}{at}>"
        )


class Metrics(Mapping[str, Metric]):
    """The metrics of a job, by name: a mapping to `Metric`.

    If several hosts have logged a name, it maps to the metric of the first host; `all` has every
    metric of every host.

    Example:
        ```python
        for name, metric in job.metrics().items():
            print(name, metric.values[-1])
        ```
    """

    def __init__(self, job_id: str, series: Sequence[Series]) -> None:
        self.job_id = job_id
        self.all = tuple(map(_as_arrays, series))
        self._by_name = {each.name: each for each in reversed(self.all)}
        self._names = dict.fromkeys(each.name for each in self.all)

    def __getitem__(self, name: str) -> Metric:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<Metrics of {self.job_id}: {', '.join(self._names) or 'nothing was logged'}>"

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each step and a column for each name.

        With metrics of several hosts, the index is (host, step). Values without a step are left
        out. The last value counts if a step was logged more than once.

        Raises:
            PreflightError: pandas is not installed.
        """
        pandas = _import_pandas()
        stepped = [metric for metric in self.all if len(metric) and metric.steps[0] >= 0]
        columns = {
            host: pandas.DataFrame({metric.name: _by_step(pandas, metric) for metric in group})
            for host, group in itertools.groupby(
                sorted(stepped, key=lambda metric: metric.host), key=lambda metric: metric.host
            )
        }
        if not columns:
            return pandas.DataFrame(index=pandas.Index([], name="step", dtype="int64"))
        if len(columns) == 1:
            return next(iter(columns.values())).rename_axis("step")
        return pandas.concat(columns, names=["host", "step"])


def _by_step(pandas: Any, metric: Metric) -> Any:
    """Return a metric as a pandas Series by step, with the last value of each step."""
    column = pandas.Series(metric.values, index=metric.steps)
    return column[~column.index.duplicated(keep="last")]


def _as_arrays(series: Series) -> Metric:
    numpy = _import_numpy()
    steps, values, times, attempts = (
        numpy.asarray(column)
        for column in (series.steps, series.values, series.times, series.attempts)
    )
    return Metric(series.name, series.host, steps, values, times, attempts)


def _import_numpy() -> Any:
    try:
        import numpy
    except ImportError as missing:
        raise PreflightError(
            "Metrics are NumPy arrays, and NumPy is not installed: pip install numpy. `kinetic "
            "jobs metrics` prints metrics without it."
        ) from missing
    return numpy


def _import_pandas() -> Any:
    try:
        import pandas
    except ImportError as missing:
        raise PreflightError(
            "A DataFrame needs pandas, which is not installed: pip install pandas."
        ) from missing
    return pandas
