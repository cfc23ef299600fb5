"""A module of a user that waits for ever when it is imported."""

import time

time.sleep(1e6)
