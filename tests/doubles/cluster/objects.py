"""Plain JSON objects: copies, patches, selectors, quantities, times and names."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

Object = dict[str, Any]

SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
QUANTITY = re.compile(r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$")
SCALES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
SCALES |= {f"{letter}i": 1024.0 ** (n + 1) for n, letter in enumerate("KMGTP")}


def clone(value: Any) -> Any:
    """Return a deep copy."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def dig(value: Any, *path: str | int, default: Any = None) -> Any:
    """Return the value at a path; `default` if a part of the path is missing or null."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return default
    return default if value is None else value


def merged(old: Any, patch: Any) -> Any:
    """Return the object with a merge patch (RFC 7386): null removes, objects merge."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def strategically_merged(old: Any, patch: Any) -> Any:
    """Return the object with a strategic merge patch, which merges lists by name or type."""
    if isinstance(patch, list) and isinstance(old, list):
        for key in ("name", "type", "uid"):
            if all(isinstance(item, dict) and key in item for item in [*old, *patch]):
                by_key = {item[key]: item for item in old}
                for item in patch:
                    if item.get("$patch") == "delete":
                        by_key.pop(item[key], None)
                    else:
                        by_key[item[key]] = strategically_merged(by_key.get(item[key]), item)
                return list(by_key.values())
        return clone(patch)
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = strategically_merged(result.get(key), value)
    return result


def json_patched(document: Any, operations: Iterable[Object]) -> Any:
    """Return the document with a JSON patch (RFC 6902, without move and copy). Raise KeyError,
    IndexError or ValueError if the patch does not fit."""
    document = clone(document)
    for operation in operations:
        parts = [p.replace("~1", "/").replace("~0", "~") for p in operation["path"].split("/")[1:]]
        holder = document
        for part in parts[:-1]:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        last, kind = parts[-1], operation["op"]
        if isinstance(holder, list):
            index = len(holder) if last == "-" else int(last)
            if kind == "add":
                holder.insert(index, clone(operation["value"]))
            elif kind == "replace":
                holder[index] = clone(operation["value"])
            elif kind == "remove":
                del holder[index]
            elif kind == "test" and holder[index] != operation["value"]:
                raise ValueError(operation["path"])
        elif kind in ("add", "replace"):
            holder[last] = clone(operation["value"])
        elif kind == "remove":
            del holder[last]
        elif kind == "test" and holder.get(last) != operation["value"]:
            raise ValueError(operation["path"])
    return document


def label_selector(text: str) -> Callable[[Object], bool]:
    """Return the predicate of a label selector, such as `a=b,c!=d,e in (f,g),h,!i`."""
    tests = [_label_test(part.strip()) for part in re.split(r",(?![^(]*\))", text) if part.strip()]
    return lambda obj: all(test(obj["metadata"].get("labels") or {}) for test in tests)


def _label_test(part: str) -> Callable[[Object], bool]:
    if matched := re.match(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$", part):
        key, values = matched[1], {v.strip() for v in matched[3].split(",")}
        wanted = matched[2] == "in"
        return lambda labels: (labels.get(key) in values) is wanted
    if "=" in part:
        equal = "!=" not in part
        key, value = (side.strip() for side in re.split(r"!=|==?", part, maxsplit=1))
        return lambda labels: (labels.get(key) == value) is equal
    if part.startswith("!"):
        return lambda labels: part[1:].strip() not in labels
    return lambda labels: part in labels


def field_selector(text: str) -> Callable[[Object], bool]:
    """Return the predicate of a field selector, such as `metadata.name=x,status.phase!=Running`."""
    tests: list[tuple[list[str], bool, str]] = []
    for part in filter(None, text.split(",")):
        wanted = "!=" not in part
        path, value = re.split(r"!=|==?", part, maxsplit=1)
        tests.append((path.strip().split("."), wanted, value.strip()))
    return lambda obj: all(
        (str(dig(obj, *path, default="")) == value) is wanted for path, wanted, value in tests
    )


def quantity(text: str | float) -> float:
    """Convert a quantity, such as "4Gi", to a number; raise ValueError if it is malformed."""
    matched = QUANTITY.match(str(text))
    if matched is None:
        raise ValueError(text)
    number, suffix = matched.groups()
    return float(number) * SCALES[suffix] if suffix in SCALES else float(number + suffix)


def plain_number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def stamp(at: float | None = None) -> str:
    """Format a time as a timestamp in whole seconds, as most of the API does; by default now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def micro_stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1e6):06d}Z"


def nano_stamp(ns: int) -> str:
    whole, rest = divmod(ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{rest:09d}Z"


def seconds(text: str) -> float:
    """Parse a timestamp into seconds since the epoch, dropping fractions."""
    import calendar

    return float(calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")))


def random_suffix(letters: int = 5) -> str:
    return "".join(random.choices(SUFFIX_LETTERS, k=letters))


def is_true(obj: Object, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in conditions(obj))


def conditions(obj: Object) -> list[Object]:
    return dig(obj, "status", "conditions", default=[])


def condition(obj: Object, kind: str) -> Object | None:
    return next((c for c in conditions(obj) if c["type"] == kind), None)


def set_condition(status: Object, new: Object) -> bool:
    """Add or replace a condition; return True if more than its times has changed."""
    held = status.setdefault("conditions", [])
    for index, old in enumerate(held):
        if old["type"] == new["type"]:
            if old["status"] == new["status"] and "lastTransitionTime" in old:
                new = new | {"lastTransitionTime": old["lastTransitionTime"]}
                if "lastProbeTime" in old:
                    new["lastProbeTime"] = old["lastProbeTime"]
            held[index] = new
            return old != new
    held.append(new)
    return True


def owner_reference(owner: Object, *, controller: bool = True) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": controller,
        "blockOwnerDeletion": True,
    }


def owner_uids(obj: Object) -> list[str]:
    return [reference["uid"] for reference in obj["metadata"].get("ownerReferences") or ()]


def controller_uid(obj: Object) -> str | None:
    return next(
        (r["uid"] for r in obj["metadata"].get("ownerReferences") or () if r.get("controller")),
        None,
    )
