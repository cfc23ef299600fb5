"""What a run is told to do: the schema, how it is read, and the rules across sections."""
