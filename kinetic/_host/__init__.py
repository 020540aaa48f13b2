"""The code that runs on a machine of a slice. Client modules never import it."""
