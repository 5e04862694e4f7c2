# SPDX-License-Identifier: Apache-2.0
"""The live page: what the router knows now (`live`), and how it is served (`serve`)."""
