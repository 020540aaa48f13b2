"""The catalogue `messages.txt`: every error, warning and notice, with a real example.

    python tests/messages.py --record [PYTEST ARGUMENTS]   run tests, and write what they raise
    python tests/messages.py                               print messages that have no instance

A message is a call in `kinetic/` of an exception of `kinetic.errors`, or of a function in `CALLS`,
with a text. Its key is its file, its function and its index among the calls there. An instance is
the text of a raised message. It must match the source: record a message again after changing it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kinetic import errors

TESTS = Path(__file__).resolve().parent
CATALOGUE = TESTS / "system" / "messages.txt"
CALLS = {"warn", "problem", "notice", "warning", "say", "_say", "_warn", "JobDiagnosis", "Failed"}
CALLS |= {"BucketNotFound"}
EXCEPTIONS = {name for name, value in vars(errors).items() if isinstance(value, type)}
HEADING = """\
# Every error, warning and notice of kinetic, with one real instance of each.
# Made by `make messages`; tests/unit/test_messages.py compares it with the sources.
"""
NONE = "(no test makes this one)"
FOLDERS = "|".join(
    re.escape(str(folder))
    for folder in (TESTS.parent, Path.home(), tempfile.gettempdir(), "/dev/shm", "/home")
)
"""Folders of this machine below which tests work, as a pattern."""
EXAMPLES = (
    (r"\bjob-[0-9a-z]{8}\b", "job-1a2b3c4d"),
    (r"\bgrp-[0-9a-z]{8}\b", "grp-1a2b3c4d"),
    (rf"(?:{FOLDERS})/(?:[^\s'\"`,:;)/]+/)*", "/path/"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:8000"),
    (r"\bpid \d+", "pid 4242"),
    (r"0x[0-9a-f]{6,}", "0x7f00"),
)
"""Patterns of text that differs from run to run, and the example that replaces each."""


class Message(NamedTuple):
    """A call in the product that makes a message, and a pattern of the texts that it can make."""

    file: str
    function: str
    call: str
    nth: int
    lines: range
    texts: re.Pattern[str]

    @property
    def key(self) -> str:
        more = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.file} {self.function} {self.call}{more}"


def list_messages(product: Path) -> list[Message]:
    """List the messages of the product's sources, in the order of files and lines."""
    messages = []
    for path in sorted(product.rglob("*.py")):
        file = path.relative_to(product).as_posix()
        numbers: dict[tuple[str, str], int] = defaultdict(int)
        for function, call in _walk_calls(ast.parse(path.read_text()), ""):
            name = _name(call.func)
            texts = [*call.args, *(keyword.value for keyword in call.keywords)]
            patterns = [pattern for text in texts if (pattern := _pattern(text)) != ".*"]
            if name not in CALLS | EXCEPTIONS or not any(" " in pattern for pattern in patterns):
                continue
            numbers[function, name] += 1
            lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
            regex = re.compile(max(patterns, key=len), re.DOTALL)
            messages.append(Message(file, function, name, numbers[function, name], lines, regex))
    return messages


def _walk_calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function or "module", child
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{function}.{child.name}".lstrip(".") if is_scope else function
        yield from _walk_calls(child, inner)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _pattern(text: ast.expr) -> str:
    """Return a regular expression for the possible texts of an expression; `.*` if unknown."""
    match text:
        case ast.Constant(value=str(value)):
            return re.sub(r"%(?:\.\d)?[sdrfi]|%%", ".*", re.escape(value).replace(r"\%", "%"))
        case ast.JoinedStr(values=parts):
            return "".join(map(_pattern, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left) + _pattern(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"(?:{_pattern(body)}|{_pattern(orelse)})"
    return ".*"


def read_catalogue() -> dict[str, str]:
    """Return the recorded instances by the key of their message."""
    entries: dict[str, str] = {}
    key = ""
    for line in CATALOGUE.read_text().splitlines()[2:] if CATALOGUE.exists() else ():
        if line.startswith("    "):
            entries[key] = f"{entries[key]}\n{line[4:]}".lstrip("\n")
        elif line:
            key = line
            entries[key] = ""
    return entries


def write_catalogue(entries: dict[str, str]) -> None:
    blocks = (f"{key}\n" + _indent(text) for key, text in entries.items())
    CATALOGUE.write_text(HEADING + "".join(f"\n{block}\n" for block in blocks))


def _indent(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() or "    " for line in text.splitlines())


def choose_instances(recorded: Path) -> dict[str, str]:
    """Return an instance for each message: the old one if it still matches, else the simplest new
    one."""
    messages = list_messages(Path(errors.__file__).parent)
    by_file: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        by_file[message.file].append(message)
    texts: dict[str, set[str]] = defaultdict(set)
    for path in recorded.glob("*.jsonl"):
        for row in path.read_text().splitlines():
            file, line, text = json.loads(row)
            for message in by_file[file]:
                plain = make_plain(text)
                if line in message.lines and message.texts.search(plain):
                    texts[message.key].add(plain)
    old = read_catalogue()
    chosen = {}
    for message in messages:
        instance = old.get(message.key, NONE)
        if instance == NONE or not message.texts.search(instance):
            instance = min(texts[message.key], key=_rank, default=NONE)
        chosen[message.key] = instance
    return chosen


def make_plain(text: str) -> str:
    """Replace the parts of a text that differ between runs or machines with examples."""
    for pattern, example in EXAMPLES:
        text = re.sub(pattern, example, text)
    lines = [line.rstrip()[:400] for line in text.strip("\n").splitlines()[:12]]
    return "\n".join(lines)


def _rank(text: str) -> tuple[bool, bool, int, str]:
    return not text.replace("\n", "").isprintable(), "''" in text, len(text), text


def record(arguments: list[str]) -> int:
    """Run pytest with a recorder in each of its processes, and write the catalogue."""
    starter = Path(sysconfig.get_path("purelib")) / "kinetic_message_recorder.pth"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        place = str(TESTS / "recording")
        starter.write_text(
            f"import sys; sys.path.append({place!r}); import message_recorder; "
            f"sys.path.remove({place!r}); message_recorder.start({folder!r})\n"
        )
        try:
            code = subprocess.run([sys.executable, "-m", "pytest", *arguments]).returncode
        finally:
            starter.unlink()
        write_catalogue(choose_instances(Path(folder)))
    return code


def main() -> int:
    if sys.argv[1:2] == ["--record"]:
        return record(sys.argv[2:])
    entries = read_catalogue()
    without = [key for key, text in entries.items() if text == NONE]
    print("\n".join(without), f"\n{len(entries)} messages, {len(without)} without an instance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
