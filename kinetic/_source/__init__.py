"""The source tree of a call: choosing its files, sending them to a store, unpacking them on
hosts."""
