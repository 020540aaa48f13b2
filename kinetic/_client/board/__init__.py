"""What is shown about jobs: the read model of CLI, notebook and drawings."""
