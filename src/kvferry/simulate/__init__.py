# SPDX-License-Identifier: Apache-2.0
"""A fleet on paper: a trace, replayed through the router's own choice over modelled engines.

Reading order: `trace` (requests), `engine` (what a modelled engine does and costs), `run` (policies
and the result). Time is virtual: nothing here waits.
"""
