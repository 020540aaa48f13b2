"""Doubles of what kinetic talks to: a cluster, a bucket, other stores and backends."""
