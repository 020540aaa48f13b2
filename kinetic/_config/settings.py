"""The caller's settings. On the caller's side, only this module reads the environment.

In: environment variables, arguments in code (flags), a profile. Out: `Settings`, a frozen value
that knows the source of each of its values.

The first of these sources wins: flag, environment, profile, variables of other tools, default.
`environment` decides which variables a job may carry, and `profiles` reads profiles; both are
imported only when needed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._config import parsers
from kinetic._core.checks import Comparison
from kinetic._core.values import dataclass
from kinetic.errors import UsageError

Environ = Mapping[str, str]


class Origin(StrEnum):
    """The kind of source of a value."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    PROFILE = "profile"
    PROFILES_FILE = "profiles file"
    OTHER_TOOLS = "environment of other tools"
    HOME, RAY_CLUSTER = "home", "Ray cluster"
    """The value was derived from the home folder, or from the address of a cluster."""
    DEFAULT = "default"


class SettingSource(NamedTuple):
    """The source of a value; as text "flag", "environment KINETIC_ZONE", "profile dev", "default".

    Attributes:
        origin: the kind of source.
        name: name of the variable or the profile, or "".
    """

    origin: Origin
    name: str = ""

    def __str__(self) -> str:
        foreign = self.origin is Origin.OTHER_TOOLS
        return f"{Origin.ENVIRONMENT if foreign else self.origin} {self.name}".rstrip()


DEFAULT, FLAG = SettingSource(Origin.DEFAULT), SettingSource(Origin.FLAG)


@dataclass(frozen=True)
class Setting:
    """One value and its source."""

    value: Any
    source: SettingSource


class _Row(NamedTuple):
    """A setting's variable, its parser, and the variables of other tools that are read if neither
    the setting's own variable nor the profile has a value."""

    variable: str
    parse: Callable[[str, Any], Any]
    fallbacks: tuple[str, ...]


def _row(
    variable: str, parse: Callable[[str, Any], Any], default: Any, fallbacks: tuple[str, ...] = ()
) -> Any:
    row = {"row": _Row(variable, parse, fallbacks)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=row)
    return field(default=default, metadata=row)


@dataclass(frozen=True)
class Settings:
    """All settings of the caller's side, one row for each: its variable, its parser, its default.

    Attributes:
        sources: the source of each value, by the setting's name.
    """

    home: Path = _row("KINETIC_HOME", parsers.absolute_path, MISSING)
    """Folder of the store, unless `store` names another store."""
    store: str = _row("KINETIC_STORE", parsers.store, "")
    """The store that takes jobs: a folder or a URI (see `_store.open`)."""
    cache_dir: Path = _row("KINETIC_CACHE_DIR", parsers.path, MISSING)
    """Folder for files that can be rebuilt, such as hashes of source files."""
    project: str | None = _row("KINETIC_PROJECT", parsers.text, None, ("GOOGLE_CLOUD_PROJECT",))
    """The cluster's project."""
    zone: str | None = _row("KINETIC_ZONE", parsers.text, None)
    """The cluster's zone."""
    cluster: str | None = _row("KINETIC_CLUSTER", parsers.text, None)
    """The cluster's name."""
    address: str | None = _row(
        "KINETIC_ADDRESS", parsers.text, None, ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    )
    """The dashboard of a Ray cluster."""
    namespace: str | None = _row("KINETIC_NAMESPACE", parsers.text, None)
    """The namespace in the cluster."""
    profile: str | None = _row("KINETIC_PROFILE", parsers.text, None)
    """The profile to read."""
    profiles_file: Path | None = _row("KINETIC_PROFILES_FILE", parsers.path, None)
    """The file of profiles; None without a home folder."""
    backend: str | None = _row("KINETIC_BACKEND", parsers.text, None)
    """One of "gke", "pathways", "local" or "ray"; None lets the accelerator decide."""
    output_dir: str | None = _row("KINETIC_OUTPUT_DIR", parsers.text, None)
    """The folder for files of functions; None for a folder of the job."""
    base_image_repo: str | None = _row("KINETIC_BASE_IMAGE_REPO", parsers.text, None)
    """The repository of prebuilt images."""
    package_root: str | None = _row("KINETIC_PACKAGE_ROOT", parsers.text, None)
    """Root folder of the source tree; None to detect it."""
    no_default_excludes: bool = _row("KINETIC_NO_DEFAULT_EXCLUDES", parsers.flag, False)
    """Send `.venv`, `node_modules` and similar folders as well."""
    context_size_warn_mb: float = _row("KINETIC_CONTEXT_SIZE_WARN_MB", parsers.number, 100.0)
    """Warn if the source tree is larger than this, in MB; 0 for never."""
    payload_size_warn_mb: float = _row("KINETIC_PAYLOAD_SIZE_WARN_MB", parsers.number, 50.0)
    """Warn if the pickled function and its arguments are larger, in MB; 0 for never."""
    log_level: str | None = _row("KINETIC_LOG_LEVEL", parsers.level, None)
    """The level of the "kinetic" logger; None leaves the level to the program."""
    queue: str | None = _row("KINETIC_QUEUE", parsers.text, None)
    """The queue of a cluster that admits jobs."""
    compare_programs: Comparison = _row("KINETIC_COMPARE_PROGRAMS", parsers.comparison, True)
    """Compare the programs that hosts run together; see the option."""
    session: str | None = _row("KINETIC_SESSION", parsers.text, None)
    """The session whose slices run calls."""
    priority: str | None = _row("KINETIC_PRIORITY", parsers.text, None)
    """The priority class of jobs."""
    reservation: str | None = _row("KINETIC_RESERVATION", parsers.reservation, None)
    """Reserved machines that jobs run on."""
    local_storage: str | None = _row("KINETIC_LOCAL_STORAGE", parsers.local_storage, None)
    """The memory of pods for local checkpoints: a size, or "multi-tier"."""
    network_devices: str | None = _row("KINETIC_NETWORK_DEVICES", parsers.network_devices, None)
    """The devices that each pod of a multi-slice TPU job claims: a number, or "all"."""
    no_tty_debug: bool = _row("KINETIC_NO_TTY_DEBUG", parsers.flag, False)
    """Allow debug=True without a terminal."""
    debug_wait_s: float = _row("KINETIC_DEBUG_WAIT_TIMEOUT", parsers.number, 600.0)
    """Seconds that a debug job waits for a debugger."""
    start_timeout_s: float = _row("KINETIC_START_TIMEOUT_S", parsers.positive, 600.0)
    """The longest time in seconds from submission until the function has started on every host.
    Also the longest time that hosts wait in JAX for other hosts."""
    grace_s: float = _row("KINETIC_GRACE_S", parsers.number, 5.0)
    """Seconds between SIGTERM and SIGKILL when a job is stopped."""
    slice_away_s: float = _row("KINETIC_SLICE_AWAY_S", parsers.number, 0.0)
    """Seconds until a lost simulated slice comes back."""
    preload: str = _row("KINETIC_PRELOAD", parsers.one_of("auto", "off"), "auto")
    """With "auto", keep a process with JAX imported, to fork hosts from, while the caller lives."""
    service_account: str = _row("KINETIC_SERVICE_ACCOUNT", parsers.text, "kinetic")
    """The service account of pods."""
    pod_python: str = _row("KINETIC_POD_PYTHON", parsers.absolute_path, "")
    """Path of an interpreter in the pods that has kinetic, so that nothing is installed."""
    pod_store: str = _row("KINETIC_POD_STORE", parsers.store, "")
    """The store's address for pods, if it differs from the caller's."""
    pod_simulated: bool = _row("KINETIC_POD_SIMULATED", parsers.flag, False)
    """Pods have virtual devices instead of accelerators."""
    pathways_head_pool: str | None = _row("KINETIC_PATHWAYS_HEAD_POOL", parsers.text, None)
    """The node pool for the pod of a single controller; None for any."""
    pathways_version: str = _row("KINETIC_PATHWAYS_VERSION", parsers.text, "latest")
    """The tag of Pathways' images."""
    prices: Mapping[str, float] = _row("KINETIC_PRICES", parsers.prices, {})
    """The user's prices of a chip in US dollars an hour, by family (see `parsers.prices`)."""
    sources: Mapping[str, SettingSource] = field(default_factory=dict)

    def setting(self, name: str) -> Setting:
        """Return one value together with its source."""
        return Setting(getattr(self, name), self.sources.get(name, DEFAULT))

    @property
    def folder(self) -> Path:
        """The folder of the store on this machine; `home` if the store is not a folder."""
        if self.store.startswith("file://"):
            from urllib.parse import unquote, urlsplit

            return Path(unquote(urlsplit(self.store).path))
        return self.home if not self.store or "://" in self.store else Path(self.store)

    @property
    def names_ray(self) -> bool:
        """True if the user's settings name a Ray cluster. Variables of Ray itself do not count,
        because Ray's own programs set them too."""
        return bool(self.address) and self.setting("address").source.origin is not (
            Origin.OTHER_TOOLS
        )

    @property
    def is_for_ray(self) -> bool:
        """True if jobs go to a Ray cluster; options of a call may say otherwise."""
        return self.backend == "ray" or (self.backend is None and self.names_ray)

    @property
    def cluster_settings(self) -> dict[str, Setting]:
        """The settings that name a cluster, with their sources. A project from GOOGLE_CLOUD_PROJECT
        is left out, because other tools set that variable too."""
        named = {name: self.setting(name) for name in ("project", "cluster") if getattr(self, name)}
        return {name: s for name, s in named.items() if s.source.origin is not Origin.OTHER_TOOLS}


class _Profile(NamedTuple):
    """A profile's values and name; the name is "" for no profile."""

    values: Mapping[str, Any]
    name: str = ""
    source: SettingSource = DEFAULT


_chosen: str | None = None
_log_level: str | None = None
_session: str | None = None


def choose_log_level(level: str | None) -> None:
    """Log messages of this level and above in this process; None: as the environment says."""
    global _log_level
    _log_level = level


def choose_session(name: str | None) -> None:
    """Run all later calls of this process on this session; None: as the environment says."""
    global _session
    _session = name


def choose_profile(name: str | None) -> None:
    """Use this profile in this process from now on, as `kinetic --profile NAME` does; None returns
    to the profile that the environment names."""
    global _chosen
    _chosen = name


def chosen_profile(environ: Environ | None = None) -> Setting | None:
    """Return the profile that a flag or the environment names; None if neither does, so that the
    file's current profile counts."""
    env = os.environ if environ is None else environ
    if _chosen is not None:
        return Setting(_chosen, FLAG)
    return (
        Setting(env["KINETIC_PROFILE"], SettingSource(Origin.ENVIRONMENT, "KINETIC_PROFILE"))
        if env.get("KINETIC_PROFILE")
        else None
    )


def load(
    environ: Environ | None = None,
    flags: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
) -> Settings:
    """Read all settings. Flags and profile entries that are None count as absent; `profile`
    replaces the user's profile.

    Raises:
        UsageError: a value is malformed (the message names the variable), a flag or profile entry
            has an unknown name, or there is no profile of the chosen name.
        StoreError: the file of profiles is damaged or cannot be read.
    """
    env = os.environ if environ is None else environ
    present_flags = {n: v for n, v in _check_names("flag", flags or {}).items() if v is not None}
    from_code = {"log_level": _log_level, "session": _session, **present_flags}
    chosen: dict[str, Setting] = {}
    file = _pick("profiles_file", env, from_code, _Profile({})) or _default_profiles_file(env)
    used = (
        _Profile(_check_names("profile", profile))
        if profile is not None
        else _read_profile(env, from_code, file)
    )
    for name in _ROWS:
        setting = _pick(name, env, from_code, used)
        if setting is not None:
            chosen[name] = setting
    if file is not None:
        chosen["profiles_file"] = Setting(_expand_path(file.value, env), file.source)
    if used.name:
        chosen["profile"] = Setting(used.name, used.source)
    chosen.setdefault("home", Setting(_join_xdg(env, "XDG_DATA_HOME", "~/.local/share"), DEFAULT))
    chosen.setdefault("cache_dir", Setting(_join_xdg(env, "XDG_CACHE_HOME", "~/.cache"), DEFAULT))
    values = {name: s.value for name, s in chosen.items()}
    folders = {name: _expand_path(values[name], env) for name in ("home", "cache_dir")}
    store = values.get("store") or str(folders["home"])
    values["store"] = store if "://" in store else str(_expand_path(store, env))
    sources = {"store": SettingSource(Origin.HOME)} | {name: s.source for name, s in chosen.items()}
    settings = Settings(**values | folders, sources=sources)
    named = "store" in chosen or settings.pod_store or not settings.is_for_ray
    return settings if named else _keep_store_on_head(settings, env)


def _keep_store_on_head(settings: Settings, env: Environ) -> Settings:
    """Return the settings with the store on the Ray cluster's head, because caller and cluster may
    share no storage."""
    from kinetic._ray import address

    store = f"ray+{address.resolve_address(settings.address or '', env)}"
    sources = {**settings.sources, "store": SettingSource(Origin.RAY_CLUSTER)}
    return replace(settings, store=store, sources=sources)


def names() -> dict[str, str]:
    """Return the variable of each setting, by the setting's name."""
    return {name: row.variable for name, row in _ROWS.items()}


def profiles_file(environ: Environ | None = None) -> Path:
    """Return the path of the file of profiles, without reading it.

    Raises:
        UsageError: there is no home folder, and no variable names the file.
    """
    env = os.environ if environ is None else environ
    file = _pick("profiles_file", env, {}, _Profile({})) or _default_profiles_file(env)
    if file is None:
        raise UsageError(
            "The file of profiles has no path, because HOME is not set. Set HOME, or set "
            "KINETIC_PROFILES_FILE to the path."
        )
    return _expand_path(file.value, env)


def on_host(environ: Environ | None = None) -> bool:
    """True if this process is the worker of a job, or a program that its function started; in such
    a process a decorated function runs its body. `KINETIC_JOB_ID` does not count if the host's
    folder does not exist: then a user has set it, or a shell has outlived its job."""
    from kinetic._core import preemption  # Lists of jobs do not need it.

    env = os.environ if environ is None else environ
    job_id = env.get("KINETIC_JOB_ID")
    if job_id is None or os.path.isdir(env.get(preemption.VARIABLE, "")):
        return job_id is not None
    _ignore_job(job_id)
    return False


@functools.cache
def _ignore_job(job_id: str) -> None:
    import logging  # needed only here

    text = "KINETIC_JOB_ID %r is ignored, because this process is not part of a running job."
    logging.getLogger("kinetic.settings").warning(text, job_id)


def worker_environ(environ: Environ | None = None) -> dict[str, str]:
    """Return the variables that a host on this machine inherits from the caller."""
    from kinetic._config import environment

    return environment.inherited_env(os.environ if environ is None else environ)


def variables() -> dict[str, str]:
    """Return a copy of the whole environment, for modules that read further variables."""
    return dict(os.environ)


def temporary_folders(environ: Environ | None = None) -> tuple[Path, ...]:
    """Return the folders that programs share for temporary files, in the order of `tempfile`."""
    env = os.environ if environ is None else environ
    named = [env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)]
    return tuple(map(Path, (*named, "/tmp", "/var/tmp", "/dev/shm")))


def _pick(name: str, env: Environ, flags: Mapping[str, Any], profile: _Profile) -> Setting | None:
    row = _ROWS[name]
    if flags.get(name) is not None:
        return Setting(row.parse(f"{name}=", flags[name]), FLAG)
    if env.get(row.variable):
        value = row.parse(row.variable, env[row.variable])
        return Setting(value, SettingSource(Origin.ENVIRONMENT, row.variable))
    if profile.values.get(name) is not None:
        return Setting(
            row.parse(f"{name} in the profile", profile.values[name]),
            SettingSource(Origin.PROFILE, profile.name),
        )
    for fallback in row.fallbacks:
        if env.get(fallback):
            value = row.parse(fallback, env[fallback])
            return Setting(value, SettingSource(Origin.OTHER_TOOLS, fallback))
    return None


def _default_profiles_file(env: Environ) -> Setting | None:
    """Return the default path of the file of profiles; if only keras-kinetic's file exists, its
    path. None without a home folder."""
    config = env.get("XDG_CONFIG_HOME", "")
    if not config.startswith("/") and not env.get("HOME"):
        return None
    ours = _join_xdg(env, "XDG_CONFIG_HOME", "~/.config") + "/profiles.json"
    if env.get("HOME") and not _exists(str(_expand_path(ours, env))):
        theirs = f"{env['HOME']}/.kinetic/profiles.json"
        return Setting(theirs if _exists(theirs) else ours, DEFAULT)
    return Setting(ours, DEFAULT)


def _read_profile(env: Environ, flags: Mapping[str, Any], file: Setting | None) -> _Profile:
    chosen = (
        chosen_profile(env) if flags.get("profile") is None else Setting(flags["profile"], FLAG)
    )
    path = "" if file is None else str(_expand_path(file.value, env))
    if chosen is None and not _exists(path):
        return _Profile({})
    from kinetic._config import profiles

    stored = profiles.read(path)
    if chosen is None and stored.current is not None:
        chosen = Setting(stored.current, SettingSource(Origin.PROFILES_FILE))
    if chosen is None:
        return _Profile({})
    return _Profile(stored.get(str(chosen.value)), str(chosen.value), chosen.source)


def _exists(path: str) -> bool:
    """True if the path exists, or if that cannot be determined."""
    try:
        os.stat(path)  # noqa: PTH116 - Path("") would be the current folder
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def _check_names(where: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(set(values) - set(_ROWS))
    if unknown:
        raise UsageError(
            f"There is no setting {unknown[0]!r} ({where}). Settings are: {', '.join(_ROWS)}."
        )
    return values


def _join_xdg(env: Environ, variable: str, fallback: str) -> str:
    base = env.get(variable, "")
    # The XDG specification ignores relative paths.
    return f"{base if base.startswith('/') else fallback}/kinetic"


def _expand_path(text: str, env: Environ) -> Path:
    if text == "~" or text.startswith("~/"):
        home = env.get("HOME")
        return (Path(home) if home else _read_passwd_home()).absolute() / text[2:]
    return Path(text).absolute()


def _read_passwd_home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError(
            "This user has no home folder: set KINETIC_HOME and KINETIC_CACHE_DIR to folders for "
            "kinetic."
        ) from error


_ROWS: dict[str, _Row] = {
    row_field.name: row_field.metadata["row"]
    for row_field in fields(Settings)
    if "row" in row_field.metadata
}
