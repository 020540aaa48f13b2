"""The source tree of a call: choose its files, send them to a store, unpack them on hosts."""
