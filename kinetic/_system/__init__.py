"""Facts from the kernel about processes, files and sockets, and from the environment about
proxies."""
