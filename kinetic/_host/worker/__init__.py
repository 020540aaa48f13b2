"""The worker: the process that runs the function."""
