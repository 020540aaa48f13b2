"""The leader of a job as a Ray driver, and the actors that start its hosts."""
