"""New weights for the servers: ``send`` is the trainer's side, ``receive`` the collector's."""
