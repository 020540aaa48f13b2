"""The agent: the witness beside the worker."""
