"""Makes ``python scripts/gpu_engines`` run the package, which imports itself as ``gpu_engines``."""

import sys
from pathlib import Path

# The folder that holds the package, in place of the package's own; and what tests share.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from gpu_engines.run import main

sys.exit(main())
