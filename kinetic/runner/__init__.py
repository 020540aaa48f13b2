"""What runs on a host: the agent, the worker that it starts, and, on this machine, the supervisor
of a simulated slice."""
