"""What runs on a machine of a slice. Laptop modules never import it."""
