"""What the kernel says about processes and sockets."""
