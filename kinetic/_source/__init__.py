"""The project's files, called the source tree: choose, send to a store, unpack on hosts."""
