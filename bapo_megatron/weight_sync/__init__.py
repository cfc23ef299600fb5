"""New weights for the servers: pause, send, resume.

``send`` is the trainer's side and ``receive`` the collector's; ``shared_memory`` is one of the ways
on which weights travel, and ``verify`` compares what both sides compute with them.
"""
