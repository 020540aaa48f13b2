"""The read model of jobs, and its presentation in the CLI, notebooks and the dashboard."""
