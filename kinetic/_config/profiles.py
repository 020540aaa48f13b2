"""Profiles: named settings of clusters in one small file. One profile may be the current one.

    {
      "current": "dev",
      "profiles": {"dev": {"project": "p", "zone": "z", "cluster": "c"}}
    }

Promises:
    1. A reader sees the old file, the new file or no file, and never a part of one.
    2. A damaged file is never overwritten.
    3. Users may edit the file. An unknown name in it is an error.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._store import files
from kinetic.errors import CorruptRecord, StoreError, StoreFull, UsageError

CLUSTER_FIELDS = ("project", "zone", "cluster", "namespace")
FIELDS = (*CLUSTER_FIELDS, "address", "store", "prices", "session")
"""The settings that a profile can hold."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = {"checksum", "current", "profiles"}
"""The keys of the file. kinetic 0.1 wrote a checksum, which is ignored."""


@dataclass(frozen=True)
class Profiles:
    """All profiles of a user.

    Attributes:
        by_name: the settings of each profile, by the profile's name.
        current: name of the current profile, or None.
    """

    by_name: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    current: str | None = None

    def get(self, name: str) -> Mapping[str, str]:
        """Return the settings of a profile.

        Raises:
            UsageError: there is no profile of this name.
        """
        if name not in self.by_name:
            raise UsageError(_describe_unknown(name, tuple(self.by_name)))
        return self.by_name[name]

    def with_profile(
        self, name: str, values: Mapping[str, str], *, force: bool = False
    ) -> Profiles:
        """Return these profiles with one more. The first profile of all becomes the current one.

        Raises:
            UsageError: a name or value is malformed, or the profile exists already and `force` is
                False.
        """
        if name in self.by_name and not force:
            raise UsageError(
                f"The profile {name!r} exists already. Choose another name, or replace it with "
                "--force."
            )
        checked = {check_name(name): _check_values(name, values)}
        return replace(
            self,
            by_name={**self.by_name, **checked},
            current=self.current if self.by_name else name,
        )

    def with_current(self, name: str | None) -> Profiles:
        """Return the same profiles with `name` as the current one; None for no current profile."""
        if name is not None:
            self.get(name)
        return replace(self, current=name)

    def without(self, name: str) -> Profiles:
        """Return the profiles without this one. If it was the current one, none is current."""
        self.get(name)
        others = {n: values for n, values in self.by_name.items() if n != name}
        return Profiles(others, None if self.current == name else self.current)


def check_name(name: str) -> str:
    """Check the name of a profile, and return it.

    Raises:
        UsageError: the name is not valid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            "A profile's name may have letters, digits, '.', '_' and '-', and must begin with a "
            f"letter or digit; got {name!r}."
        )
    return name


def _check_values(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    unknown = sorted(map(str, set(values) - set(FIELDS)))
    if unknown:
        raise UsageError(
            f"The profile {name!r} has an unknown setting {unknown[0]!r}. Profiles set "
            f"{', '.join(FIELDS)}."
        )
    for setting, value in values.items():
        if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
            raise UsageError(
                f"The setting {setting} of the profile {name!r} must be a string without blanks; "
                f"got {value!r}."
            )
    return {setting: values[setting] for setting in FIELDS if setting in values}


def _describe_unknown(name: str, names: tuple[str, ...]) -> str:
    if not names:
        return (
            f"There is no profile {name!r}, and no other profile. Create it: kinetic profile "
            f"create {name} --project … --cluster …"
        )
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Profiles are: {', '.join(sorted(names))}."
    return f"There is no profile {name!r}. {hint}"


# -- the file --------------------------------------------------------------------------------------


def render(profiles: Profiles) -> bytes:
    """Return the content of the file. Equal profiles have equal content."""
    content = {
        "current": profiles.current,
        "profiles": {n: dict(profiles.by_name[n]) for n in sorted(profiles.by_name)},
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def parse(data: bytes, path: str | Path = "profiles.json") -> Profiles:
    """Parse the content of the file; `path` is its path in errors.

    Raises:
        CorruptRecord: the content is damaged, or an edit made it invalid.
    """
    document = _load_document(data, path)
    try:
        return _build_profiles(document, path)
    except UsageError as error:
        raise CorruptRecord(
            f"The file of profiles {path} cannot be used. {error} {_advise_repair(path)}"
        ) from error


def _advise_repair(path: str | Path) -> str:
    return f"Repair the file, or start over: mv {path} {path}.damaged"


def _load_document(data: bytes, path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(
            f'The file of profiles {path} is not JSON: "{error}". {_advise_repair(path)}'
        ) from error
    if not isinstance(document, dict):
        raise CorruptRecord(
            f"The file of profiles {path} is not a JSON object. {_advise_repair(path)}"
        )
    if document.keys() - _KEYS:
        unknown = min(document.keys() - _KEYS)
        raise CorruptRecord(
            f"The file of profiles {path} has the unknown key {unknown!r}; its keys are 'current' "
            f"and 'profiles'. {_advise_repair(path)}"
        )
    return document


def _build_profiles(document: Mapping[str, Any], path: str | Path) -> Profiles:
    stored, current = document.get("profiles", {}), document.get("current")
    if not isinstance(stored, dict) or not all(
        isinstance(values, dict) for values in stored.values()
    ):
        raise CorruptRecord(
            f'In the file of profiles {path}, "profiles" must map names to objects of settings. '
            f"{_advise_repair(path)}"
        )
    by_name = {check_name(name): _check_values(name, values) for name, values in stored.items()}
    if current is not None and (not isinstance(current, str) or current not in by_name):
        raise CorruptRecord(
            f"The file of profiles {path} has no profile {current!r}, but names it as current. "
            f"{_advise_repair(path)}"
        )
    return Profiles(by_name, current)


def read(path: str | Path) -> Profiles:
    """Read the file of profiles. If there is no file, return `Profiles` without any profile.

    Raises:
        CorruptRecord: the file is damaged.
        StoreError: the file cannot be read.
    """
    try:
        return parse(files.content(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return Profiles()
    except OSError as error:
        raise StoreError(
            f"The file of profiles {path} cannot be read: {error.strerror}. {_WAY_OUT}"
        ) from error


_WAY_OUT = "Change the file's owner or mode, or set KINETIC_PROFILES_FILE to another file."


def change(path: str | Path, how: Callable[[Profiles], Profiles]) -> Profiles:
    """Read the file, change the profiles with `how`, replace the file, and return the new ones.

    Raises:
        UsageError: raised by `how`; the file is unchanged.
        CorruptRecord: the file is damaged; it is unchanged.
        StoreError: the file cannot be read or written.
    """
    # If the path is a symbolic link, as with dotfiles in a repository, it must stay a link.
    target = Path(os.path.realpath(path))
    # Two processes that write at the same moment must not share a temporary file.
    temporary = target.with_name(f"{target.name}.{os.urandom(8).hex()}.new")
    profiles = how(read(target))
    try:
        target.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(render(profiles))
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(
            f"The file of profiles {path} cannot be written: {error.strerror}. {_WAY_OUT}"
        ) from error
    return profiles
