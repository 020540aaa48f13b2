"""The zygote as a program.

In: a descriptor and modules to import, see `zygote`. Out: supervisors.
"""

import gc

gc.disable()  # Imports create no garbage, and collections would slow them.

from kinetic._host.local.zygote import main  # noqa: E402

main()
