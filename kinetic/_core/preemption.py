"""Names of the files by which an agent and its function tell each other about preemption and saves.
Files also work for programs that the function starts.
"""

from __future__ import annotations

VARIABLE = "KINETIC_PREEMPTION"
"""The environment variable with the folder of the files."""
NOTICE = "preempted"
"""From the agent: the cluster takes a host of the gang away. The file holds the time, by
`time.monotonic`, at which functions will be ended at the latest."""
POLLING = "looks-for-preemption"
"""From the function: it polls for the notice, and needs no SIGTERM."""
NOTICED = "saw-preemption"
"""From the function: it knows of the preemption, and will end because of it."""
SAVING = {"persistent": "saving-persistent", "local": "saving-local"}
"""From the function, by kind of storage: it is writing a checkpoint of the step in the file."""
