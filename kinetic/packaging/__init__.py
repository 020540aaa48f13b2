"""What travels: the project's source tree, and the call itself."""
