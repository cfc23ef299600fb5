"""New weights for the servers: from rank 0, through one of three carriers, checked at both ends.

Read in this order: ``messages`` (what rank 0 asks of the collector), ``send`` (rank 0's side of a
push), ``buckets`` (the weights, piece by piece), ``carriers`` and ``collective_group`` (how a piece
travels), ``servers`` (what is needed of them), ``receive`` (the collector's side), ``verify``.
"""
