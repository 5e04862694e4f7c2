"""Write the licence's line into every source file that lacks it: python scripts/licence_lines.py"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE = "# SPDX-License-Identifier: Apache-2.0\n"


def main() -> None:
    for folder in ("src", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if not text.startswith(LINE):
                file.write_text(LINE + text, encoding="utf-8")


if __name__ == "__main__":
    main()
