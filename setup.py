# SPDX-License-Identifier: Apache-2.0
"""What a release says about where it is published. All else is in pyproject.toml.

    KVFERRY_URL=https://HOST/OWNER/kvferry python -m build

names the repository in the package's metadata, and makes the README's links absolute, so that they
work on an index of packages. Without the variable, nothing is named and links stay as they are.
"""

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
# A link or an image whose target is a file of this repository
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def absolute(readme: str, url: str, version: str) -> str:
    """The README with links to the files of this version."""

    def linked(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/v{version}/{target})"

    return LINK.sub(linked, readme)


def project_urls(url: str, version: str) -> dict[str, str]:
    return {
        "Source": url,
        "Documentation": f"{url}/blob/v{version}/docs/index.md",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    source = (HERE / "src" / "kvferry" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    url = os.environ.get("KVFERRY_URL", "").rstrip("/")
    setup(
        long_description=absolute(readme, url, version) if url else readme,
        long_description_content_type="text/markdown",
        project_urls=project_urls(url, version) if url else {},
    )
