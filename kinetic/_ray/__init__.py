"""Client of a Ray cluster's dashboard over HTTP; needs no Ray."""
