"""What is left out of the source tree.

In: the text of ignore files, names. Out: for a file or folder, whether a rule leaves it out or
keeps it; whether it is likely to hold keys or passwords.

Two languages. `.gitignore` as git reads it (wildmatch: "*" stops at "/", "**" does not; nested
files; the last rule that matches decides). `.kineticignore`, at the root only, as fnmatch reads it:
against the path and against the name, "*" crosses "/". In both "#" starts a comment, a trailing "/"
means folders only, a leading "!" keeps what an earlier rule leaves out.

Git's rules are translated here instead of by the pathspec package: its version 1.1.1 disagrees with
git on lists such as "*", "!*/", "!ab" (the test that compares with git shows it), and it would add
30 ms to the first walk of a tree.
"""

from __future__ import annotations

import codecs
import fnmatch
import functools
import os
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

OF_ENVIRONMENT = frozenset({"pyvenv.cfg", "bin", "include", "lib", "lib64"})
"""The parts of a virtual environment, for one made in the project's own folder."""
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_CACHE = "CACHEDIR.TAG"
_STORE = frozenset({".tmp", "blobs", "refs"})

_NEVER = "(?!)"
_POSIX = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    "space": r" \t\n\r\f\v",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}
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
        whole_path: whether it is matched against the path (relative to the ignore file) or the
            name.
        keeps: whether it keeps what matches (a leading "!").
        folders_only: whether it matches only folders.
    """

    regex: str
    whole_path: bool
    keeps: bool
    folders_only: bool


class IgnoreRules:
    """The rules of one ignore file.

    Attributes:
        kept_paths: those that a rule without wildcards keeps.
    """

    def __init__(
        self, rules: Iterable[Rule], *, of_bytes: bool = False, kept_paths: Sequence[str] = ()
    ) -> None:
        """Compile the rules; with `of_bytes` each character of them stands for one byte of a
        path."""
        self.kept_paths = kept_paths
        self._of_bytes = of_bytes
        self._rules = [
            (r, re.compile(rf"(?:{r.regex})\Z", re.DOTALL)) for r in reversed(list(rules))
        ]
        self._names = self._compile_rules(whole_path=False)
        self._paths = self._compile_rules(whole_path=True)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def _compile_rules(self, *, whole_path: bool) -> re.Pattern[str] | None:
        parts = {r.regex for r, _ in self._rules if r.whole_path is whole_path}
        return re.compile(rf"(?:{'|'.join(sorted(parts))})\Z", re.DOTALL) if parts else None

    def decide(self, path: str, name: str, *, is_folder: bool) -> bool | None:
        """Return True to leave out, False to keep, None when no rule matches. The last rule that
        matches decides."""
        if self._of_bytes and not path.isascii():
            path, name = _as_bytes(path), _as_bytes(name)
        # Most files match nothing, which two combined expressions find out.
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


@dataclass(frozen=True)
class Gitignore:
    """The rules of one `.gitignore`, and how to make a path relative to its folder.

    Attributes:
        rules: the rules.
        cut: characters to take off a path that is relative to the tree's root.
        prefix: what to put before it instead, for an ignore file above the root: "packages/mine/".
    """

    rules: IgnoreRules
    cut: int = 0
    prefix: str = ""


def is_ignored_by_git(
    gitignores: Sequence[Gitignore], path: str, name: str, *, is_folder: bool
) -> bool | None:
    """Return the verdict of the nearest `.gitignore` (the last one) with a matching rule."""
    for gitignore in reversed(gitignores):
        verdict = gitignore.rules.decide(
            gitignore.prefix + path[gitignore.cut :], name, is_folder=is_folder
        )
        if verdict is not None:
            return verdict
    return None


def is_not_source(names: Set[str], *, default_excludes: bool) -> bool:
    """Whether a folder with these names in it is not source: a kinetic store, an environment,
    or a cache.

    Environments are recognised by the files of venv and conda, caches by the tag of
    https://bford.info/cachedir/.
    """
    if names >= _STORE:
        return True
    return default_excludes and (_CACHE in names or any(name in names for name in _ENVIRONMENT))


def git_rules(data: bytes) -> IgnoreRules:
    """Read a `.gitignore`. To git a path is bytes: "?" is one byte, and "[é]" is one of two."""
    lines = data.removeprefix(codecs.BOM_UTF8).decode("latin-1").split("\n")
    return IgnoreRules(
        (rule for line in lines if (rule := _git_rule(line)) is not None), of_bytes=True
    )


def _as_bytes(path: str) -> str:
    return os.fsencode(path).decode("latin-1")


def kinetic_rules(data: bytes) -> IgnoreRules:
    """Read a `.kineticignore`."""
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = [line.strip() for line in text.splitlines()]
    kept = [_bare_pattern(line).removeprefix("/") for line in lines if line.startswith("!")]
    return IgnoreRules(
        (rule for line in lines for rule in _kinetic_line(line)),
        kept_paths=[path for path in kept if not re.search(r"[*?\[]", path)],
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


def _git_rule(line: str) -> Rule | None:
    line = _without_trailing_spaces(line.removesuffix("\r"))
    if not line or line.startswith("#"):
        return None
    keeps = line.startswith("!")
    pattern = line[1:] if keeps else line
    folders_only = pattern.endswith("/")
    pattern = pattern.removesuffix("/")
    whole_path = "/" in pattern
    regex = _wildmatch(pattern.removeprefix("/"), whole_path=whole_path) if pattern else _NEVER
    return Rule(regex, whole_path, keeps, folders_only)


def _without_trailing_spaces(line: str) -> str:
    end = len(line.rstrip(" "))
    escapes = len(line[:end]) - len(line[:end].rstrip("\\"))
    return line[: end + 1] if escapes % 2 and end < len(line) else line[:end]


def _wildmatch(pattern: str, *, whole_path: bool) -> str:
    """Translate a pattern of git; https://git-scm.com/docs/gitignore#_pattern_format."""
    one, out, at = ("[^/]" if whole_path else "."), "", 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "*":
            at, part = _stars(pattern, at, whole_path)
        elif letter == "?":
            at, part = at + 1, one
        elif letter == "[":
            at, part = _bracket(pattern, at + 1, whole_path)
        elif letter == "\\":
            part, at = (re.escape(pattern[at + 1]) if at + 1 < len(pattern) else _NEVER), at + 2
        else:
            at, part = at + 1, re.escape(letter)
        out += part
    return out


def _stars(pattern: str, at: int, whole_path: bool) -> tuple[int, str]:
    end = at
    while end < len(pattern) and pattern[end] == "*":
        end += 1
    if not whole_path:
        return end, ".*"
    if end - at > 1 and (at == 0 or pattern[at - 1] == "/"):
        if end == len(pattern):
            return end, ".*"
        if pattern[end] == "/":
            return end + 1, "(?:.*/)?"
        if pattern[end : end + 2] == "\\/":
            return end + 2, ".*/"
    return end, "[^/]*"


def _bracket(pattern: str, at: int, whole_path: bool) -> tuple[int, str]:
    """Translate a character set, starting after its "["; an unterminated one matches nothing."""
    negated = pattern[at : at + 1] in ("!", "^")
    at += negated
    members, before, first = "", "", True
    while first or pattern[at : at + 1] != "]":
        first, letter = False, pattern[at : at + 1]
        if not letter:
            return len(pattern), _NEVER
        if letter == "\\":
            letter, at = pattern[at + 1 : at + 2], at + 1
            members += re.escape(letter)
        elif letter == "-" and before and pattern[at + 1 : at + 2] not in ("", "]"):
            at += 2 if pattern[at + 1] == "\\" else 1
            last = pattern[at : at + 1]
            members += f"{re.escape(before)}-{re.escape(last)}" if before <= last else ""
            letter = "" if last else letter
        elif letter == "[" and pattern[at + 1 : at + 2] == ":":
            close = pattern.find("]", at + 2)
            if close < 0:
                return len(pattern), _NEVER
            if close > at + 2 and pattern[close - 1] == ":":
                name, at, letter = pattern[at + 2 : close - 1], close, ""
                if name not in _POSIX:
                    return len(pattern), _NEVER
                members += _POSIX[name]
            else:
                members += re.escape("[")
        else:
            members += re.escape(letter)
        before, at = letter, at + 1
    slash = "(?!/)" if whole_path else ""
    if not members:
        return at + 1, f"{slash}." if negated else _NEVER
    return at + 1, f"{slash}[{'^' if negated else ''}{members}]"


def leads_to_hidden(root: str, target: str) -> bool:
    """Whether a link's target looks secret, or lies in a hidden folder, as keys below a home do."""
    below = target[len(root) :] if target.startswith(f"{root.rstrip('/')}/") else target
    return looks_secret(target.rpartition("/")[2]) or any(
        part.startswith(".") for part in below.split("/")
    )


@functools.cache
def _secret() -> re.Pattern[str]:
    """Names that are likely to be keys: one search for each file, not many."""
    return re.compile("|".join(map(translate, _SECRETS)))


def looks_secret(name: str) -> bool:
    """Whether a file of this name is likely to hold a key or a password."""
    return _secret().match(name) is not None and not name.endswith(".pub")
