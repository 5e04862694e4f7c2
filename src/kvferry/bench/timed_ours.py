"""kvferry's connectors with their calls timed, for `kvferry bench handover`."""

from kvferry import vllm as ours
from kvferry.bench.timed import timed

FerryConnector = timed(ours.FerryConnector)
NixlConnector = timed(ours.NixlConnector)
MooncakeConnector = timed(ours.MooncakeConnector)
