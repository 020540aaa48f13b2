"""Pages over the board of jobs, in a browser: the extra `dashboard`."""
