"""A module of a user that exits when it is imported."""

import sys

sys.exit(0)
