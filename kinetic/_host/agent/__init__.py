"""The agent of a host: starts the worker, keeps its output, reports its end."""
