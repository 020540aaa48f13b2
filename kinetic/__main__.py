"""`python -m kinetic`: the command line, run by this interpreter whatever is on PATH."""

from __future__ import annotations

from kinetic.cli.main import main

if __name__ == "__main__":
    main()
