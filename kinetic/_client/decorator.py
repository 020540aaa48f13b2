"""Step 1, specify: `kinetic.run`. Invalid options raise at the decoration, not at the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, cast

from kinetic._client.options import check_options, document_options, warn_of_spot
from kinetic._client.remote import RemoteCallable
from kinetic._core.options import Keywords, Options
from kinetic._core.tracebacks import hide_frames
from kinetic.errors import KineticError, UsageTypeError

if TYPE_CHECKING:
    import os

    from kinetic._datasets.data import Data

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """The decorator that `kinetic.run(...)` returns."""

    def __call__(self, func: Callable[P, R], /) -> RemoteCallable[P, R]:
        """Return the function as a `RemoteCallable`."""
        ...


@hide_frames
def run(  # noqa: PLR0917 - the order in which scripts may pass them
    accelerator: str = "tpu-v5litepod-1",
    container_image: str | None = None,
    base_image_repo: str | None = None,
    zone: str | None = None,
    project: str | None = None,
    capture_env_vars: Sequence[str] | None = None,
    cluster: str | None = None,
    backend: str | None = None,
    namespace: str | None = None,
    volumes: Mapping[str, Data] | None = None,
    spot: bool = False,
    output_dir: str | os.PathLike[str] | None = None,
    debug: bool = False,
    **options: Unpack[Keywords],
) -> Decorator:
    """Decorate a function so that each call runs it on an accelerator slice.

    Durations are numbers of seconds, text such as "90s" or "1h30m", or a `timedelta`.

    Raises:
        UsageError: An option is invalid.

    Example:
        ```python
        @kinetic.run("tpu-v6e-8", timeout="1h")
        def train(steps):
            ...

        loss = train(1000)
        ```
    """
    values = locals()
    values |= values.pop("options")
    if callable(accelerator):
        raise UsageTypeError(
            'Write @kinetic.run(accelerator="...") with parentheses: the decorator takes options.'
        )
    checked = check_options(None, values)
    warn_of_spot(checked)

    @hide_frames
    def decorate(func: Callable[..., Any]) -> RemoteCallable[..., Any]:
        decorated: RemoteCallable[..., Any] = RemoteCallable(func, checked)
        _warm_up_early(func, checked)
        return decorated

    return cast("Decorator", decorate)


document_options(run)
_decorated: list[None] = []
"""One item for each function that the main program has decorated."""


def _warm_up_early(func: Callable[..., Any], options: Options) -> None:
    """Let the backend prepare in the background when a script or notebook decorates its first
    function. Errors in settings are ignored here, because the call raises them.

    A function of an imported module may never be called, so nothing is prepared for it.
    """
    from kinetic._config import settings

    if getattr(func, "__module__", None) != "__main__" or settings.on_host():
        return
    _decorated.append(None)
    if len(_decorated) > 1:
        return
    from kinetic._client.planning import target_of

    with contextlib.suppress(KineticError, OSError):
        target_of(options).warm_up(options)
