"""What the kernel says about processes and sockets; what the environment says about proxies."""
