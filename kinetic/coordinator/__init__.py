"""The room between the hosts: who has joined, who is alive, who failed first.

In: joins, beats, reports, stacks. Out: ready, stop, all done. Called by the supervisor (service), agents and people (client).
`gang` and `blame` are pure and load no gRPC; `service` and `client` are the edge.
"""
