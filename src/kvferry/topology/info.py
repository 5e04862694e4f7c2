"""What a rank learns of a remote engine at the handshake, one record per pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvferry.layout.model import CacheModel
from kvferry.layout.shape import EngineShape


@dataclass(frozen=True, slots=True)
class TransferRegion:
    """One layer's cache on this rank: layers of one engine may have pages of different lengths."""

    layer_name: str
    layer_index: int
    base_addr: int
    block_len: int  # bytes from one block to the next
    kv_block_len: int  # bytes of a block that are used
    group_index: int = 0


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """A remote engine's pipeline stage. The first fields are those that vLLM's connectors use."""

    remote_tp_size: int
    remote_block_len: int  # bytes of one block of one layer on one rank
    remote_block_size: int  # tokens in a block
    remote_physical_blocks_per_logical: int
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0  # exclusive; 0: this stage holds all layers
    remote_dcp_size: int = 1
    # what the planner needs beyond that
    incarnation: str = ""  # random per start of the engine; another one voids all that was known
    remote_shape: EngineShape | None = None  # None: as the fields above imply
    model_fingerprint: str = ""  # of the remote's CacheModel; "": not compared
    remote_model: CacheModel | None = None  # as it described itself; None: as ours

    def differences(self, other: EngineTransferInfo) -> list[str]:
        """Fields in which two records disagree, with both values."""
        return [
            f"{f.name}: {getattr(self, f.name)!r}, now {getattr(other, f.name, None)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name, None)
        ]


@dataclass(frozen=True, slots=True)
class MambaEngineTransferInfo(EngineTransferInfo):
    """A stage of a hybrid engine: which ranks to read attention from, and which states.

    `TransferTopology.register_remote_engine` works these out where they are left at their defaults.
    """

    remote_fa_source_ranks: tuple[int, ...] = ()
    remote_all_source_ranks: tuple[int, ...] = ()  # all to be read, attention or state
    remote_num_fa_reads: int = 0
    remote_num_mamba_reads: int = 0
    remote_fa_descriptor_bytes: int = 0  # read from one block of one layer of the first source
    is_remote_replicated: bool = False
    remote_physical_heads: int = 0  # heads on one remote rank
