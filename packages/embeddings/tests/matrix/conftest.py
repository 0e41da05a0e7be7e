"""Lets the tests, and the ranks that they start, import `oracle`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
