"""Everything that generates: SGLang servers, their client, the collector process, replay."""
