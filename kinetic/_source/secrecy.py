"""Which files are likely to hold keys or passwords, by their names.

In: a name, or where a link leads. Out: a guess.
"""

from __future__ import annotations

import functools
import re
from fnmatch import translate

_SECRETS = (
    ".env*", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ecdsa*", "id_ed25519*",
    "credentials*.json", "service-account*.json", "service_account*.json",
    ".netrc", ".pypirc", ".git-credentials", ".npmrc",
    "id_dsa*", "*.pfx", "*.jks", "*.kdbx", "kubeconfig", "kubeconfig.y*ml", "kubeconfig-*",
    "secrets.json", "secrets.toml", "secrets.y*ml", "client_secret*.json",
    "token", "token.json", "token.txt", ".pgpass",
)  # fmt: skip


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
