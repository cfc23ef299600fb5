"""A module of a user that cannot be imported."""

value = 1 / 0
