"""The Ray cluster that settings or a place name, and the backend of its jobs.

In: settings, places. Out: an address; a backend that asks it when an answer is needed.
"""

from __future__ import annotations

from kinetic._backends.ray.backend import RayBackend
from kinetic._backends.ray.submission import HostSettings
from kinetic._config import settings as configuration
from kinetic._config.settings import Settings
from kinetic._core.place import Place
from kinetic._core.plan import Blob
from kinetic._ray import address
from kinetic._ray.jobs_api import JobsApi, JobsApiLimits
from kinetic._store.base import Store


def find_address(settings: Settings) -> str:
    """Return the address of the Jobs API."""
    return address.resolve_address(settings.address or "", configuration.variables())


def open_api(url: str, *, limits: JobsApiLimits | None = None) -> JobsApi:
    """Return the dashboard with this URL, and the token of the caller's environment."""
    return JobsApi(url, address.find_token(configuration.variables()), limits=limits)


def make_backend(place: Place, store: Store) -> RayBackend:
    """Return the backend of a place, with the settings of this process."""
    chosen = configuration.load()

    def read_archive() -> tuple[Blob, bytes]:
        from kinetic._source import runtime

        made = runtime.archive(chosen.cache_dir)
        return made.blob, made.data

    return RayBackend(
        store,
        lambda: open_api(place.address),
        read_archive,
        HostSettings(
            archive="",
            store_uri=chosen.pod_store or store.uri,
            python=chosen.pod_python,
            simulated=chosen.pod_simulated,
        ),
    )
