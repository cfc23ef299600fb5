"""New weights for the servers: from rank 0, through one of three carriers, checked at both ends.

Reading order: ``messages``, ``send``, ``carriers``, ``collective_group``, ``receive``, ``verify``
(docs/architecture.md).
"""
