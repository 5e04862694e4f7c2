# SPDX-License-Identifier: Apache-2.0
"""kvferry's connectors with their calls timed, for `python -m benchmarks.handover`."""

from benchmarks.timed import timed
from kvferry import vllm as ours

FerryConnector = timed(ours.FerryConnector)
NixlConnector = timed(ours.NixlConnector)
MooncakeConnector = timed(ours.MooncakeConnector)
