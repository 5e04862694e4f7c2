"""Makes ``python scripts/matrix`` run the package, which imports itself as ``matrix``."""

import signal
import sys
from pathlib import Path

# The folder that holds the package, in place of the package's own; and what tests share.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from matrix.run import main

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
sys.exit(main())
