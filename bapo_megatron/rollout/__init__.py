"""Generation: the pool of engines, the collector process around it, and replay."""
