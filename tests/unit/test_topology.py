"""The topology: identity, registry, and answers that come from the planner."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, replace

import pytest

from kvferry import EngineShape, Rank, RankLayout
from kvferry.errors import IncompatibleError, TopologyError
from kvferry.layout.presets import load_model
from kvferry.topology import EngineTransferInfo, MambaEngineTransferInfo, TransferTopology


def topology(
    tp_rank: int = 0, tp_size: int = 4, heads: int = 8, **more: object
) -> TransferTopology:
    return TransferTopology(
        tp_rank=tp_rank,
        tp_size=tp_size,
        block_size=16,
        engine_id="decode",
        is_mla=bool(more.pop("is_mla", False)),
        is_mamba=bool(more.pop("is_mamba", False)),
        total_num_kv_heads=heads,
        attn_backends=[],
        **more,  # type: ignore[arg-type]
    )


def info(tp: int = 8, **more: object) -> EngineTransferInfo:
    return EngineTransferInfo(
        remote_tp_size=tp,
        remote_block_len=65536,
        remote_block_size=16,
        remote_physical_blocks_per_logical=1,
        **more,  # type: ignore[arg-type]
    )


class TestRegistry:
    def test_registering_again_changes_nothing(self) -> None:
        t = topology()
        first = t.register_remote_engine("prefill", info())
        assert t.register_remote_engine("prefill", info()) == first
        assert t.get_engine_info("prefill") == first

    def test_a_conflict_within_an_incarnation_is_refused_with_the_difference(self) -> None:
        t = topology()
        t.register_remote_engine("prefill", info(incarnation="a"))
        with pytest.raises(TopologyError) as error:
            t.register_remote_engine("prefill", info(4, incarnation="a"))
        assert "remote_tp_size: 8, now 4" in str(error.value)
        assert t.get_engine_info("prefill").remote_tp_size == 8

    def test_a_new_incarnation_replaces_all_stages(self) -> None:
        t = topology()
        for stage in range(2):
            t.register_remote_engine("prefill", info(incarnation="a", remote_pp_rank=stage))
        t.register_remote_engine("prefill", info(4, incarnation="b"))
        assert t.get_engine_info("prefill").remote_tp_size == 4
        with pytest.raises(TopologyError, match=r"stages known: \[0\]"):
            t.get_engine_info("prefill", 1)

    def test_unregistering(self) -> None:
        t = topology()
        t.register_remote_engine("prefill", info())
        t.unregister_remote_engine("prefill")
        t.unregister_remote_engine("prefill")
        with pytest.raises(TopologyError, match="shake hands"):
            t.target_remote_ranks("prefill")

    def test_itself_another_model_and_a_wrong_rank_are_refused(self) -> None:
        with pytest.raises(TopologyError, match="itself"):
            topology().register_remote_engine("decode", info())
        with pytest.raises(IncompatibleError, match="fingerprint"):
            topology().register_remote_engine("prefill", info(model_fingerprint="other"))
        with pytest.raises(TopologyError, match="outside its engine"):
            topology(tp_rank=4)

    def test_records_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            info().remote_tp_size = 3  # type: ignore[misc]


class TestRanks:
    def test_sizes_that_do_not_divide(self) -> None:
        expected = [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]]
        for rank, ranks in enumerate(expected):
            t = topology(rank, 3, heads=24)
            t.register_remote_engine("prefill", info(8))
            assert t.target_remote_ranks("prefill") == ranks
            assert t.handshake_target_ranks(8) == ranks

    def test_pipeline_stages_are_asked_one_by_one(self) -> None:
        model = load_model("llama-3.1-8b")
        remote = EngineShape(tp=2, pp=2)
        t = topology(1, 4, pp_rank=1, pp_size=2, model=model, shape=EngineShape(tp=4, pp=2))
        for stage, layers in enumerate([(0, 16), (16, 32)]):
            t.register_remote_engine(
                "prefill",
                info(
                    2,
                    remote_pp_rank=stage,
                    start_layer=layers[0],
                    end_layer=layers[1],
                    remote_shape=remote,
                    model_fingerprint=model.fingerprint(),
                ),
            )
        assert t.target_remote_ranks("prefill", 0) == []  # layers of our other stage
        assert t.target_remote_ranks("prefill", 1) == [0]

    def test_stages_from_layer_ranges_alone(self) -> None:
        model = load_model("deepseek-v3")
        with_shape = topology(0, 2, is_mla=True, model=model)
        by_range = topology(0, 2, is_mla=True, model=model)
        remote = EngineShape(tp=4, pp=3, stages=(20, 21, 20))
        for stage, (start, end) in enumerate([(0, 20), (20, 41), (41, 61)]):
            record = info(4, remote_pp_rank=stage, start_layer=start, end_layer=end)
            by_range.register_remote_engine("p", record)
            with_shape.register_remote_engine("p", replace(record, remote_shape=remote))
            assert by_range.target_remote_ranks("p", stage) == with_shape.target_remote_ranks(
                "p", stage
            )

    def test_dcp(self) -> None:
        for rank in range(4):
            t = topology(rank, 4, heads=1, is_mla=True, dcp_size=4)
            assert t.dcp_rank == rank
            assert t.handshake_target_ranks(4, remote_dcp_size=4) == [rank]
        assert topology(0, 1, heads=1, is_mla=True).handshake_target_ranks(4, 4) == [0, 1, 2, 3]

    def test_readers_mirror_sources(self) -> None:
        remote = info(8, incarnation="x")
        reads = {}
        for rank in range(3):
            t = topology(rank, 3, heads=24)
            t.register_remote_engine("prefill", remote)
            reads[rank] = t.target_remote_ranks("prefill")
        for rank in range(8):
            t = TransferTopology(rank, 8, 16, "prefill", False, False, 24)
            t.register_remote_engine("decode", info(3))
            assert t.remote_readers("decode") == [d for d, ranks in reads.items() if rank in ranks]

    def test_replication(self) -> None:
        t = topology(heads=2)
        t.register_remote_engine("wide", info(8))
        t.register_remote_engine("narrow", info(2))
        assert t.is_kv_replicated("wide") and not t.is_kv_replicated("narrow")
        mla = topology(is_mla=True)
        mla.register_remote_engine("narrow", info(2))
        assert mla.replicates_kv_cache("narrow") and not mla.is_kv_replicated("narrow")

    def test_description(self) -> None:
        t = topology(1)
        t.register_remote_engine("prefill", info(8, end_layer=0))
        text = t.describe("prefill")
        assert "[2, 3]" in text and "tp=8" in text and "'decode'" in text and "\n" not in text


class TestPartners:
    """A described rank's topology, as the connector holds it."""

    SHAPE, REMOTE = EngineShape(tp=3, block_size=24), EngineShape(tp=8, pp=2)

    def described(self, rank: Rank) -> TransferTopology:
        model = load_model("llama-3.1-8b")
        t = TransferTopology.of("d", model, RankLayout.build(model, self.SHAPE, rank, 2))
        for stage in range(2):
            told = info(8, remote_pp_rank=stage, remote_shape=self.REMOTE, remote_model=model)
            t.register_remote_engine("p", told)
        return t

    def test_every_rank_hears_from_as_many_as_are_said(self) -> None:
        said = [self.described(rank).partners("p") for rank in self.SHAPE.ranks]
        heard = Counter(source for partners in said for source in partners)
        assert set(heard) == set(self.REMOTE.ranks)
        for partners in said:
            assert all(readers == heard[source] for source, readers in partners.items())

    def test_partners_are_the_ranks_to_shake_hands_with(self) -> None:
        for rank in self.SHAPE.ranks:
            t = self.described(rank)
            for stage in range(2):
                asked = t.handshake_target_ranks(8, 1, stage, self.REMOTE)
                assert asked == sorted(r.tp for r in t.partners("p") if r.pp == stage)
                assert set(t.target_remote_ranks("p", stage)) <= set(asked)

    def test_layers_that_only_one_side_has(self) -> None:
        whole, rank = load_model("llama-3.1-8b"), Rank(0, 0)
        (group,) = whole.groups
        draft = replace(group, name="draft", layers=(0, 1), role="draft")
        ours = replace(whole, groups=(group, draft))
        layout = RankLayout.build(ours, EngineShape(), rank, 2)
        told = info(1, remote_shape=EngineShape(), remote_model=whole)
        strict = TransferTopology.of("d", ours, layout)
        strict.register_remote_engine("p", told)
        with pytest.raises(IncompatibleError, match="group 'draft'"):
            strict.pair_with("p")
        lenient = TransferTopology.of("d", ours, layout, frozenset({"draft"}))
        lenient.register_remote_engine("p", told)
        assert lenient.pair_with("p").model.groups == (group,)
        lacking = ours.beyond(lenient.pair_with("p").model)
        assert lacking is not None and lacking.groups == (draft,)
        assert whole.beyond(whole) is None


class TestHybrids:
    def test_registration_works_out_what_to_read(self) -> None:
        model = load_model("qwen3-next-80b")  # 2 kv heads, 16 and 32 linear heads
        t = topology(0, 2, heads=2, is_mamba=True, model=model, shape=EngineShape(tp=2))
        registered = t.register_remote_engine("prefill", info(8))
        assert isinstance(registered, MambaEngineTransferInfo)
        assert registered.remote_all_source_ranks == (0, 1, 2, 3)
        assert set(registered.remote_fa_source_ranks) <= {0, 1, 2, 3}
        assert registered.remote_num_mamba_reads == 4
        assert registered.is_remote_replicated and registered.remote_physical_heads == 1
        assert registered.remote_fa_descriptor_bytes == 65536
        assert t.register_remote_engine("prefill", info(8)) == registered

    def test_what_the_caller_tells_stands(self) -> None:
        t = topology(0, 2, is_mamba=True)
        told = MambaEngineTransferInfo(8, 65536, 16, 1, remote_fa_descriptor_bytes=123)
        assert t.register_remote_engine("p", told).remote_fa_descriptor_bytes == 123  # type: ignore[attr-defined]

    def test_physical_blocks(self) -> None:
        assert TransferTopology.compute_physical_blocks_per_logical((3072, 65536), 65536) == 2
        assert TransferTopology.compute_physical_blocks_per_logical((100, 28), 128) == 1
