"""Doubles of the services that kinetic uses: a cluster, a bucket, other stores and backends."""
