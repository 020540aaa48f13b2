"""What calls go through: the selected place, its backend and store, and the settings.

In: options, calls. Out: plans, submitters of batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kinetic._core.plan import needs_jax
from kinetic._core.values import dataclass
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._backends.base import Backend
    from kinetic._client.batch.inputs import CallArguments
    from kinetic._client.batch.submitters import PackagedSubmitter
    from kinetic._client.planning import Planned
    from kinetic._config.settings import Settings
    from kinetic._core.options import Options
    from kinetic._core.place import Place
    from kinetic._core.spec import JobSpec
    from kinetic._store.base import Store


@dataclass(frozen=True)
class Client:
    """What calls go through.

    Attributes:
        place: where they go.
        settings: the caller's.
        backend: made from the place and the store.
        store: where the records of jobs are kept.
        notice: a line for the caller, or "".
    """

    place: Place
    settings: Settings
    backend: Backend
    store: Store
    notice: str = ""

    def plan_call(self, job: JobSpec) -> Planned:
        """Plan one call."""
        from kinetic._client import planning

        return planning.make(job, self.settings, self.place)

    def package_batch(self, job: JobSpec, calls: Sequence[CallArguments]) -> PackagedSubmitter:
        """Plan what the calls of a batch share.

        Raises:
            PreflightError: the backend cannot take such jobs now, or their image cannot be built.
        """
        from kinetic._client import planning, submission
        from kinetic._client.batch.submitters import PackagedSubmitter

        given = [(call.args, call.kwargs) for call in calls]
        about = planning.template(job, self.settings, self.place, calls=given)
        self.backend.preflight(about.draft)
        draft = submission.with_image(about.draft, about.installed, self.backend)
        about = dataclasses.replace(about, draft=draft)
        self.note_output(about.draft.output_dir)
        return PackagedSubmitter(calls, job.func, about, self.backend, self.store)

    def note_output(self, output_dir: str | None) -> None:
        """Remember where files will be left, so that later calls do not send them."""
        if output_dir is not None:
            from kinetic._source import outputs

            outputs.note(self.settings.cache_dir, output_dir)

    def tell(self, warnings: Sequence[str]) -> None:
        """Print warnings before a job leaves the machine."""
        from kinetic._client.board import console

        if self.notice:
            console.notice(self.notice)
        for warning in warnings:
            _log_once(warning)

    def warm_up(self, options: Options) -> None:
        """Let the backend prepare what takes time while a call with these options is planned."""
        from kinetic._backends.base import WarmUp

        if not isinstance(self.backend, WarmUp) or self.settings.preload == "off":
            return
        from kinetic._config import environment
        from kinetic._config import settings as configuration

        names = options.capture_env_vars
        captured = environment.select_env_vars(names, configuration.variables()) if names else ()
        self.backend.warm_up(
            needs_jax=needs_jax(options),
            variables=[*options.env, *options.secrets, *captured],
            libraries=[name for name in _SLOW_LIBRARIES if name in sys.modules],
        )


_SLOW_LIBRARIES = ("keras", "orbax.checkpoint", "flax", "equinox")
"""They take long to import, and start neither a thread nor a JAX backend when they are."""
_OF_A_PLACE = (
    *("backend", "project", "zone", "cluster", "namespace", "base_image_repo"),
    *("queue", "priority", "reservation", "local_storage", "network_devices"),
    "service_account",
)
"""Options that are settings too."""


def client_of(options: Options) -> Client:
    """Read the settings, and select the place."""
    from kinetic._backends import registry
    from kinetic._config import settings as configuration
    from kinetic._store.open import open_store

    flags = {name: getattr(options, name) for name in _OF_A_PLACE}
    settings = configuration.load(flags=flags)
    if settings.log_level is not None:
        from kinetic._config import verbosity

        verbosity.show(settings.log_level)
    selection = registry.select(options, settings)
    store = open_store(settings.store)
    backend = registry.make(selection.place, store)
    return Client(selection.place, settings, backend, store, selection.notice)


def warm_up_ahead(func: Callable[..., Any], options: Options) -> None:
    """Let the backend prepare for the first function that a script or a notebook decorates, while
    the program goes on; errors in the settings are left to the call.

    A function of an imported module may never be called: nothing is prepared for those.
    """
    from kinetic._config import settings

    if getattr(func, "__module__", None) != "__main__" or settings.on_host() or not _is_first():
        return
    with contextlib.suppress(KineticError, OSError):
        client_of(options).warm_up(options)


_seen: list[None] = []


def _is_first() -> bool:
    _seen.append(None)
    return len(_seen) == 1


@functools.cache
def _log_once(warning: str) -> None:
    import logging

    logging.getLogger("kinetic").warning("kinetic: %s", warning)
