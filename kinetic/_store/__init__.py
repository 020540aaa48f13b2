"""Where jobs and content rest: one small seam, one implementation per kind of storage."""
