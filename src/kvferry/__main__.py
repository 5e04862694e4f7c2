"""`python -m kvferry` is the `kvferry` command."""

from kvferry.cli.main import app

app()
