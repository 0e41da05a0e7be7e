"""Ranks load the tests' files anew, by themselves: the models beside them must be found."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
