"""The size and grain of the product: the table in ARCHITECTURE.md, and figures to watch.

    python tests/lines.py            print the figures; fail if the table is out of date
    python tests/lines.py --write    update the table
    python tests/lines.py --list     print each small private function, banned name and riddle

Lines in the table are rounded, and may drift by a tenth before the table must be updated. The first
form is a part of `make check`.
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
SMALL = 4
"""Most lines of a "small" private function, counted with `def` and without docstring: a module that
calls it only once should inline it."""
BANNED_NAMES = {
    *("found", "told", "said", "made", "given", "asked", "seen", "shown", "kept", "known", "left"),
    *("gone", "taken", "there", "here", "around", "ahead", "beside", "behind", "aside", "again"),
    *("later", "once"),
}
"""Names that do not say what a variable holds. `each` is allowed only in comprehensions of one
line."""
RIDDLES = ("What", "How", "Where", "Who", "Why", "Which", "As", "Of", "Told")
"""First words of docstrings that do not say what a function does."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def package_of(path: Path) -> str:
    """Return the package of a file: a part of _backends or _host, or a package of kinetic."""
    parts = path.relative_to(ROOT / "kinetic").parts[:-1]
    if parts in ((), ("runner",)):
        return "kinetic"
    return "/".join(parts[:2] if parts[0] in ("_backends", "_host") else parts[:1])


def count_lines() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in (ROOT / "kinetic").rglob("*.py"):
        counts[package_of(path)] += path.read_text().count("\n")
    return counts


def count_code_lines(function: Function) -> int:
    """Count the lines of a function, without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def measure_functions() -> list[int]:
    """Return the code lines of every function, shortest first."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "kinetic").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return sorted(count_code_lines(node) for node in nodes if isinstance(node, Function))


def list_small_helpers(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and name of each small private function that its module uses once."""
    uses: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            uses[node.id] += 1
        elif isinstance(node, ast.Attribute):
            uses[node.attr] += 1
    return [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and node.name.startswith("_")
        and not node.name.endswith("__")
        and not node.decorator_list
        and uses[node.name] == 1
        and count_code_lines(node) <= SMALL
    ]


def list_banned_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and name of each variable, argument, attribute or function with a banned name."""
    short = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        and node.lineno == node.end_lineno
        for name in ast.walk(node)
    }
    uses = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case _:
                continue
        bare = name.strip("_").lower()
        if bare in BANNED_NAMES or (bare == "each" and node not in short):
            uses.append((node.lineno, name))
    return uses


def list_docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and first word of each string statement: docstrings, also below assignments."""
    texts = (
        statement.value
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
    return [
        (text.lineno, words[0])
        for text in texts
        if isinstance(text.value, str) and (words := text.value.split())
    ]


def print_prose(*, by_line: bool) -> None:
    """Print how many docstrings open with a riddle, the longest page, and the changelog's lines."""
    for folder in ("kinetic", "tests", "benchmarks", "examples"):
        words: Counter[str] = Counter()
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, word in list_docstrings(ast.parse(path.read_text())):
                words[word] += 1
                if by_line and word in RIDDLES:
                    print(f"{path.relative_to(ROOT)}:{line}: docstring opens with {word}")
        riddles = sum(words[word] for word in RIDDLES)
        print(f"docstrings in {folder + '/':12} {words.total():6,}, {riddles} open with a riddle")
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", PAGE]
    lengths = {path: path.read_text().count("\n") for path in pages}
    longest = max((path for path in pages if path != PAGE), key=lambda path: lengths[path])
    changes = (ROOT / "CHANGELOG.md").read_text().count("\n")
    print(f"longest page: {longest.relative_to(ROOT)}, {lengths[longest]} lines")
    print(f"ARCHITECTURE.md: {lengths[PAGE]} lines; CHANGELOG.md: {changes} lines")


def print_grain(*, by_line: bool) -> None:
    """Print the counts of modules, functions, small helpers and banned names of each package."""
    modules: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    helpers: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for path in sorted((ROOT / "kinetic").rglob("*.py")):
        tree, package = ast.parse(path.read_text()), package_of(path)
        modules[package] += 1
        functions[package] += sum(isinstance(node, Function) for node in ast.walk(tree))
        for title, uses, count in (
            ("small helper", list_small_helpers(tree), helpers),
            ("banned name", list_banned_names(tree), names),
        ):
            count[package] += len(uses)
            for line, name in uses if by_line else ():
                print(f"{path.relative_to(ROOT)}:{line}: {title} {name}")
    lines = count_lines()
    print(f"{'':24}{'lines':>8}{'modules':>9}{'functions':>11}{'helpers':>9}{'names':>7}")
    for package in sorted(modules):
        print(
            f"{package:24}{lines[package]:8,}{modules[package]:9}{functions[package]:11,}"
            f"{helpers[package]:9}{names[package]:7}"
        )
    print(
        f"{'all':24}{lines.total():8,}{modules.total():9}{functions.total():11,}"
        f"{helpers.total():9}{names.total():7}"
    )
    print(f"helpers: private functions of at most {SMALL} lines with one caller")
    print("names: uses of BANNED_NAMES")


def collect_figures() -> dict[str, int]:
    lengths = measure_functions()
    packages = count_lines()
    return {
        **{f"`{name}`": number for name, number in sorted(packages.items())},
        "all": packages.total(),
        "functions": len(lengths),
        "median of their lines": round(statistics.median(lengths)),
    }


def make_table(figures: dict[str, int]) -> str:
    """Return the table, with two packages in each row."""
    cells = [
        f"{name} | {number if number < ROUNDED else round(number, -2):,} |"
        for name, number in figures.items()
    ]
    cells += [" | |"] * (len(cells) % 2)
    rows = (f"| {first} {second}\n" for first, second in zip(cells[::2], cells[1::2], strict=True))
    return "| package | lines | package | lines |\n|---|---|---|---|\n" + "".join(rows)


def find_drift(text: str, figures: dict[str, int]) -> list[str]:
    """Return the rows of the page's table that differ from the figures by more than `DRIFT`."""
    rows = dict(re.findall(r"\| ([^|]+?) \| ([\d,]+) (?=\|)", text))
    table = {name: int(number.replace(",", "")) for name, number in rows.items()}
    faults = [f"{name} is missing, or obsolete" for name in table.keys() ^ figures.keys()]
    for name in table.keys() & figures.keys():
        room = max(DRIFT * figures[name], ROUNDED if figures[name] >= ROUNDED else 1)
        if abs(table[name] - figures[name]) > room:
            faults.append(f"{name}: {table[name]}, but now {figures[name]}")
    return sorted(faults)


def main() -> int:
    page, figures = PAGE.read_text(), collect_figures()
    table = TABLE.search(page)
    assert table, "ARCHITECTURE.md lacks the comments around the table of lines"
    if "--write" in sys.argv:
        PAGE.write_text(page[: table.start(2)] + make_table(figures) + page[table.end(2) :])
        return 0
    print_grain(by_line="--list" in sys.argv)
    print_prose(by_line="--list" in sys.argv)
    for fault in (faults := find_drift(table[2], figures)):
        print(f"ARCHITECTURE.md, table of lines: {fault}", file=sys.stderr)
    if faults:
        print("Update the table: python tests/lines.py --write", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
