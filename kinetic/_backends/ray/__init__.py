"""Jobs on a Ray cluster, by way of its dashboard.

In: plans and refs. Out: Ray jobs, and what is known of them.
"""
