"""Storage of jobs and content: one small seam, one implementation per kind of storage."""
