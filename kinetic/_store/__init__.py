"""Storage of jobs and content: one small protocol, one implementation per kind of storage."""
