"""Clients that others wrote: agents that get an address, a key and the name of a model."""
