"""Step 1, specify: the decorator.

In: options. Out: a decorator that makes a `RemoteCallable` of a function. Every error in the
options is raised when the function is decorated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, cast

from kinetic._client.client import warm_up_ahead
from kinetic._client.options import check_options, document_options, warn_of_spot
from kinetic._client.remote import RemoteCallable
from kinetic._core.options import Keywords
from kinetic._core.tracebacks import own_frames_hidden
from kinetic.errors import UsageTypeError

if TYPE_CHECKING:
    import os

    from kinetic._datasets.data import Data

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What `kinetic.run(...)` returns."""

    def __call__(self, func: Callable[P, R], /) -> RemoteCallable[P, R]:
        """Decorate a function."""
        ...


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
    """Make a function run on an accelerator slice whenever it is called.

    Lengths of time are numbers of seconds, text such as "90s" or "1h30m", or a `timedelta`.

    Raises:
        UsageError: an option cannot work; nothing was created.
    """
    given = locals()
    more = given.pop("options")
    with own_frames_hidden:
        if callable(accelerator):
            raise UsageTypeError(
                'Write @kinetic.run(accelerator="...") with parentheses: the decorator takes '
                "options."
            )
        made = check_options(None, given | more)
    warn_of_spot(made)

    def decorate(func: Callable[..., Any]) -> RemoteCallable[..., Any]:
        with own_frames_hidden:
            decorated: RemoteCallable[..., Any] = RemoteCallable(func, made)
        warm_up_ahead(func, made)
        return decorated

    return cast("Decorator", decorate)


document_options(run)
