"""Import time and start of the command line, compared with the bare interpreter and the one package
that each needs."""

from __future__ import annotations

import compileall

import measure


def main() -> None:
    compileall.compile_dir(str(measure.ROOT / "kinetic"), quiet=2)
    with measure.home():
        own, floor = measure.medians(
            measure.python("-c", "import kinetic"),
            measure.python("-c", "import cloudpickle"),
            runs=15,
        )
        used, _ = measure.medians(
            measure.python("-c", "import kinetic; kinetic.run"),
            measure.python("-c", "pass"),
            runs=15,
        )
        cli = "from kinetic.cli.main import main; main()"
        help_, listing, click = measure.medians(
            measure.python("-c", cli, "--help"),
            measure.python("-c", cli, "jobs", "list"),
            measure.python("-c", "import click"),
            runs=15,
        )
    measure.heading("start-up (floors: interpreter + cloudpickle; interpreter + click)")
    measure.row("import kinetic", own, floor, "<= 1.3x")
    measure.row("import kinetic, use kinetic.run", used, floor)
    measure.row("kinetic --help", help_, click, "<= 1.5x")
    measure.row("kinetic jobs list", listing, click, "<= 1.5x")


if __name__ == "__main__":
    main()
