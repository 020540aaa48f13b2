"""A job's leader as a Ray driver, and the actors that start its hosts."""
