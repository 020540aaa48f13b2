"""Rules for leaving files and folders out of the source tree.

In: the text of ignore files, and names. Out: rules that leave out or keep a file or folder; names
that are likely to hold keys or passwords.

`.kineticignore` lies at the root and is read as fnmatch does: patterns are matched against the path
and against the name, "*" crosses "/", "#" starts a comment, a trailing "/" means folders only, a
leading "!" keeps what an earlier rule leaves out. git itself reports what it ignores (see `git`).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Sequence, Set
from fnmatch import translate

from kinetic._core.values import dataclass

ALWAYS = frozenset({".git", "__pycache__"})
DEFAULTS = frozenset(
    {
        ".venv",
        "venv",
        "node_modules",
        ".tox",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".ipynb_checkpoints",
        ".DS_Store",
    }
)

ENVIRONMENT_PARTS = frozenset({"pyvenv.cfg", "bin", "include", "lib", "lib64"})
"""Names to leave out where a project's folder is also a virtual environment."""
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
CACHE_TAG = "CACHEDIR.TAG"
_STORE = frozenset({".tmp", "blobs", "refs"})

_SECRETS = (
    ".env*", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ecdsa*", "id_ed25519*",
    "credentials*.json", "service-account*.json", "service_account*.json",
    ".netrc", ".pypirc", ".git-credentials", ".npmrc",
    "id_dsa*", "*.pfx", "*.jks", "*.kdbx", "kubeconfig", "kubeconfig.y*ml", "kubeconfig-*",
    "secrets.json", "secrets.toml", "secrets.y*ml", "client_secret*.json",
    "token", "token.json", "token.txt", ".pgpass",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One line of an ignore file.

    Attributes:
        regex: source of the regular expression that must match all of the path or name.
        whole_path: True to match the whole path, False to match only the name.
        keeps: whether it keeps what matches (a leading "!").
        folders_only: whether it matches only folders.
    """

    regex: str
    whole_path: bool
    keeps: bool
    folders_only: bool


class IgnoreRules:
    """The rules of a `.kineticignore`.

    Attributes:
        kept_paths: paths that a "!" rule without wildcards keeps.
    """

    def __init__(self, rules: Iterable[Rule], *, kept_paths: Sequence[str] = ()) -> None:
        self.kept_paths = kept_paths
        self._rules = [
            (r, re.compile(rf"(?:{r.regex})\Z", re.DOTALL)) for r in reversed(list(rules))
        ]
        self._names = self._compile_rules(whole_path=False)
        self._paths = self._compile_rules(whole_path=True)

    def _compile_rules(self, *, whole_path: bool) -> re.Pattern[str] | None:
        parts = {r.regex for r, _ in self._rules if r.whole_path is whole_path}
        return re.compile(rf"(?:{'|'.join(sorted(parts))})\Z", re.DOTALL) if parts else None

    def decide(self, path: str, name: str, *, is_folder: bool) -> bool | None:
        """Return True to leave out, False to keep, None if no rule matches. The last rule wins."""
        # Most files match no rule: two combined expressions are faster than trying each rule.
        if not (
            (self._names and self._names.match(name)) or (self._paths and self._paths.match(path))
        ):
            return None
        for rule, regex in self._rules:
            if (is_folder or not rule.folders_only) and regex.match(
                path if rule.whole_path else name
            ):
                return not rule.keeps
        return None


def is_not_source(names: Set[str], *, default_excludes: bool) -> bool:
    """True if a folder that contains these names is not source but a kinetic store, a virtual
    environment or a cache.

    Environments are recognised by the files of venv and conda, caches by the tag of
    https://bford.info/cachedir/.
    """
    if names >= _STORE:
        return True
    return default_excludes and (
        CACHE_TAG in names or any(name in names for name in _ENVIRONMENT_MARKS)
    )


def kinetic_rules(data: bytes) -> IgnoreRules:
    """Parse the content of a `.kineticignore`."""
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = [line.strip() for line in text.splitlines()]
    exceptions = [_bare_pattern(line).removeprefix("/") for line in lines if line.startswith("!")]
    return IgnoreRules(
        (rule for line in lines for rule in _kinetic_line(line)),
        kept_paths=[path for path in exceptions if not re.search(r"[*?\[]", path)],
    )


def _kinetic_line(line: str) -> list[Rule]:
    keeps, folders_only = line.startswith("!"), line.endswith("/")
    pattern = _bare_pattern(line)
    if not pattern.strip("/") or line.startswith("#"):
        return []
    if pattern.startswith("/"):
        return [Rule(_shell(pattern[1:]), True, keeps, folders_only)]
    return [Rule(_shell(pattern), whole_path, keeps, folders_only) for whole_path in (True, False)]


def _bare_pattern(line: str) -> str:
    return line.removeprefix("!").rstrip("/").removeprefix("./")


def _shell(pattern: str) -> str:
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def leads_to_hidden(root: str, target: str) -> bool:
    """True if a link leads to a file that looks secret or is in a hidden folder, like `~/.ssh`."""
    below = target[len(root) :] if target.startswith(f"{root.rstrip('/')}/") else target
    return looks_secret(target.rpartition("/")[2]) or any(
        part.startswith(".") for part in below.split("/")
    )


@functools.cache
def _secret() -> re.Pattern[str]:
    """Match names that are likely to be keys. One combined pattern is faster than one per name."""
    return re.compile("|".join(map(translate, _SECRETS)))


def looks_secret(name: str) -> bool:
    """True if a file of this name is likely to hold a key or a password."""
    return _secret().match(name) is not None and not name.endswith(".pub")
