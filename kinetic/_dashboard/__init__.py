"""Pages about all jobs in a browser: the extra `dashboard`."""
