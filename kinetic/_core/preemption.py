"""Names of the files through which an agent and its function exchange preemption and saves.

Files also reach programs that the function starts.
"""

from __future__ import annotations

VARIABLE = "KINETIC_PREEMPTION"
"""The environment variable with the folder of the files."""
NOTICE = "preempted"
"""From the agent: a host of the gang is taken away. The file holds the latest time, by
`time.monotonic`, at which functions are ended."""
POLLING = "looks-for-preemption"
"""From the function: it polls for the notice, and needs no SIGTERM."""
NOTICED = "saw-preemption"
"""From the function: it knows of the preemption, and will end because of it."""
SAVING = {"persistent": "saving-persistent", "local": "saving-local"}
"""From the function, by tier: it is writing a checkpoint of the step that the file holds."""
