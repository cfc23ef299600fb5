"""Weight sync: ``send`` is the trainer's side, ``receive`` the collector's."""
