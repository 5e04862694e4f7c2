"""Helpers beside the test folders (golden.py) can be imported from all of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
