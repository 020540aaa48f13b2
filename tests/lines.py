"""Where the lines are: the table in ARCHITECTURE.md, and whether it is still true.

    python tests/lines.py            fail if the table is not true any more; `make check` runs it
    python tests/lines.py --write    write it anew

In: the files of kinetic. Out: lines of each package, how long functions are. Lines are rounded, and
may drift by a tenth before the table must be written again.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
TABLE = re.compile(r"(<!-- lines: begin -->\n)(.*?)(<!-- lines: end -->)", re.DOTALL)
ROUNDED = 100
DRIFT = 0.1


def package_of(path: Path) -> str:
    """The package that a file belongs to: one of the backends, or one of kinetic."""
    parts = path.relative_to(ROOT / "kinetic").parts[:-1]
    if not parts:
        return "kinetic"
    return "/".join(parts[:2] if parts[0] in ("_backends", "_host") else parts[:1])


def count_lines() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in (ROOT / "kinetic").rglob("*.py"):
        found[package_of(path)] += path.read_text().count("\n")
    return found


def measure_functions() -> list[int]:
    """Lines of each function, without its docstring."""
    found = []
    for path in (ROOT / "kinetic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                first = node.body[0]
                doc = ast.get_docstring(node) is not None
                skipped = first.end_lineno - first.lineno + 1 if doc and first.end_lineno else 0
                found.append(node.end_lineno - node.lineno + 1 - skipped)
    return sorted(found)


def collect_figures() -> dict[str, int]:
    lengths = measure_functions()
    packages = count_lines()
    return {
        **{f"`{name}`": number for name, number in sorted(packages.items())},
        "all": packages.total(),
        "functions": len(lengths),
        "median of their lines": round(statistics.median(lengths)),
        "nine of ten have at most": lengths[len(lengths) * 9 // 10],
    }


def make_table(found: dict[str, int]) -> str:
    rows = [
        f"| {name} | {number if number < ROUNDED else round(number, -2):,} |\n"
        for name, number in found.items()
    ]
    return "| package | lines |\n|---|---|\n" + "".join(rows)


def find_drift(text: str, found: dict[str, int]) -> list[str]:
    """What the table says that is not so any more."""
    rows = dict(re.findall(r"^\| (.+?) \| ([\d,]+) \|$", text, re.MULTILINE))
    told = {name: int(number.replace(",", "")) for name, number in rows.items()}
    faults = [f"{name} is not there" for name in told.keys() ^ found.keys()]
    for name in told.keys() & found.keys():
        room = max(DRIFT * found[name], ROUNDED if found[name] >= ROUNDED else 1)
        if abs(told[name] - found[name]) > room:
            faults.append(f"{name}: {told[name]}, which are {found[name]}")
    return sorted(faults)


def main() -> int:
    page, found = PAGE.read_text(), collect_figures()
    table = TABLE.search(page)
    assert table, "ARCHITECTURE.md has no place for the table"
    if "--write" in sys.argv:
        PAGE.write_text(page[: table.start(2)] + make_table(found) + page[table.end(2) :])
        return 0
    for fault in (faults := find_drift(table[2], found)):
        print(f"ARCHITECTURE.md, where the lines are: {fault}", file=sys.stderr)
    if faults:
        print("Write the table anew: python tests/lines.py --write", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
