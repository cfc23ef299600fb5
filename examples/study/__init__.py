"""What BAPO's adaptive bounds are worth, with seeds, intervals and controls (docs/study.md)."""
