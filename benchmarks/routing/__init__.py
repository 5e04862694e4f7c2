# SPDX-License-Identifier: Apache-2.0
"""What the router costs and what it gains.

python -m benchmarks.routing --part overhead               a real router, an engine that answers
                                                           after a known time
python -m benchmarks.routing --part engines                real engines behind this router and
                                                           others, beside a simulation
python -m benchmarks.routing --part trace --trace FILE     policies on a trace, modelled engines
"""
