"""What every package stands on: files, processes, workers, calls between processes, versions."""
