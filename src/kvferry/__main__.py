# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry` is the `kvferry` command."""

from kvferry.cli.main import app

app()
