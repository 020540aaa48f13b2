"""`python -m kinetic`: the command line of this very interpreter, whatever is on PATH.

In: the arguments. Out: what the command says.
"""

from __future__ import annotations

from kinetic.cli.main import main

if __name__ == "__main__":
    main()
