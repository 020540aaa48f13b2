"""The driver of a job as a program: `python -m kinetic._host.ray`.

In: `KINETIC_*` variables, see `driver`. Out: a `ProgramCode`.
"""

import gc

gc.disable()  # Imports, Ray's above all, create no garbage, and collections would slow them.

from kinetic._host import program  # noqa: E402
from kinetic._host.ray.driver import main  # noqa: E402

if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    program.leave(main())
