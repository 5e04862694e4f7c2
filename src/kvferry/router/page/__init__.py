# SPDX-License-Identifier: Apache-2.0
"""The live page: what the router knows now, and the HTML that shows it."""
