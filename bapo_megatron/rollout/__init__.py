"""Everything that generates: a pool of engines, the collector process around it, replay."""
