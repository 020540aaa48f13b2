"""`python -m kinetic.runner`: one host, as a backend starts it where hosts are programs.

In: `KINETIC_*` variables (see _host.identity). Out: a `ProgramCode`.
"""

from __future__ import annotations

from kinetic._host import program

if __name__ == "__main__":
    program.leave(program.main())
