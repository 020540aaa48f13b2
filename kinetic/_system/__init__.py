"""Facts from the kernel (processes, files, sockets), and proxies from the environment."""
