"""One configuration in several variants by seeds: run, resumed, compared (docs/launch.md)."""
