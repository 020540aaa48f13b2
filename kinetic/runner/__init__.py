"""The program of a host: the agent, and the worker that it starts."""
