"""New weights for the servers: from rank 0, through one of three carriers, checked at both ends.

Read in this order: ``messages`` (what rank 0 asks of the collector), ``send`` (the trainer's side
of a push), ``carriers`` (the weights, piece by piece, and how a piece travels) and
``collective_group``, ``servers`` (what is needed of them), ``receive`` (the collector's side),
``verify``.
"""
