"""Lets the tests, and the ranks that they start, import `oracle` and `checkpoint_runs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
