"""`python -m kinetic`: the command line of this interpreter, regardless of PATH."""

from __future__ import annotations

from kinetic.cli.main import main

if __name__ == "__main__":
    main()
