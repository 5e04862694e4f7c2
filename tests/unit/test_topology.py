"""The topology: identity, registry, and answers that come from the planner."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, replace

import pytest

from kvferry import CacheModel, Component, EngineShape, Group, Rank, RankLayout
from kvferry.errors import IncompatibleError, TopologyError
from kvferry.layout.hf import load_model
from kvferry.plan import plan_pair
from kvferry.topology import MOST_PAIRS, EngineTransferInfo, TransferTopology


def one_layer(heads: int, mla: bool = False) -> CacheModel:
    component = Component("kv", 1 if mla else heads, (1,), 1, "replicated" if mla else "split")
    return CacheModel("one layer", (Group("attention", (0,), (component,)),))


def topology(
    tp: int = 0, shape: EngineShape | None = None, model: CacheModel | None = None, pp: int = 0
) -> TransferTopology:
    return TransferTopology(
        "decode", model or one_layer(8), shape or EngineShape(tp=4), Rank(pp, tp)
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
        for _ in range(2):
            t.register_remote_engine("prefill", info())
            assert t.get_engine_info("prefill") == info()

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

    def test_a_plan_is_that_of_the_order_in_which_an_engine_names_its_groups(self) -> None:
        """A producer that pushes makes the same plan from its own description."""
        latent = (Component("kv", 1, (8,), 1, "replicated"),)
        groups = (Group("mla", (0, 1, 2), latent), Group("index", (0, 1), latent))
        ours = CacheModel("m", groups)
        other = CacheModel("m", groups[::-1])
        src, dst = EngineShape(tp=4), EngineShape(tp=2)
        t = topology(shape=dst, model=ours)
        found = []
        for name, model in (("p", ours), ("q", other)):
            t.register_remote_engine(name, info(remote_shape=src, remote_model=model))
            pair = t.pair_with(name)
            shares = [
                [(e.src, s.group, s.layers.tolist()) for e in one.edges for s in e.shares]
                for one in (pair, plan_pair(model, src, dst, dst_model=ours))
            ]
            assert shares[0] == shares[1], name
            found.append(shares[0])
        assert found[0] != found[1]

    def test_plans_for_many_shapes_are_not_all_kept(self) -> None:
        """A peer may come with another shape after each of its restarts."""
        t = topology()
        for size in range(1, MOST_PAIRS + 10):
            shape = EngineShape(tp=8, block_size=size)
            t.register_remote_engine("p", info(remote_shape=shape))
            assert t.pair_with("p") is t.pair_with("p")
            t.unregister_remote_engine("p")
        assert len(t._pairs) == MOST_PAIRS

    def test_an_unknown_engine_is_a_key_error_too(self) -> None:
        """vLLM's connectors ask and catch a KeyError."""
        with pytest.raises(KeyError) as error:
            topology().get_engine_info("prefill")
        assert isinstance(error.value, TopologyError)
        assert str(error.value).startswith("stage 0 of engine 'prefill' is not registered")

    def test_the_record_comes_back(self) -> None:
        told = info()
        assert topology().register_remote_engine(engine_id="prefill", info=told) is told

    def test_itself_is_refused(self) -> None:
        with pytest.raises(TopologyError, match="itself"):
            topology().register_remote_engine("decode", info())

    def test_records_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            info().remote_tp_size = 3  # type: ignore[misc]


class TestRanks:
    def test_sizes_that_do_not_divide(self) -> None:
        expected = [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]]
        for rank, ranks in enumerate(expected):
            t = topology(rank, EngineShape(tp=3), one_layer(24))
            t.register_remote_engine("prefill", info(8))
            assert t.source_ranks("prefill") == ranks
            assert t.target_remote_ranks("prefill") == ranks
            assert t.handshake_target_ranks(8) == ranks

    def test_ranks_with_equal_heads_are_met_and_one_is_read(self) -> None:
        t = topology(1, EngineShape(tp=2), one_layer(2))
        t.register_remote_engine("prefill", info(4))
        assert t.target_remote_ranks("prefill") == t.handshake_target_ranks(4) == [2, 3]
        assert len(t.source_ranks("prefill")) == 1
        assert t.is_kv_replicated("prefill") and t.replicates_kv_cache("prefill")
        assert "equal bytes" in t.describe("prefill")

    def test_who_replicates(self) -> None:
        for heads, mla, tp, few, equal in [
            (2, False, 2, False, False),
            (2, False, 4, True, True),
            (1, True, 1, False, True),
            (1, True, 4, True, True),
        ]:
            t = topology(0, EngineShape(tp=2), one_layer(heads, mla))
            t.register_remote_engine("prefill", info(tp))
            assert t.is_kv_replicated("prefill") is few
            assert t.replicates_kv_cache("prefill") is equal

    def test_a_stage_without_its_engines_shape_stands_alone(self) -> None:
        t = topology(1, EngineShape(tp=2), one_layer(2))
        for stage, tp in enumerate((1, 4)):
            t.register_remote_engine("prefill", info(tp, remote_pp_rank=stage))
        assert [t.target_remote_ranks("prefill", stage) for stage in range(2)] == [[0], [2, 3]]
        assert [t.is_kv_replicated("prefill", stage) for stage in range(2)] == [False, True]
        assert "remote_pp=1" in t.describe("prefill", 1)

    def test_ratios(self) -> None:
        t = topology(0, EngineShape(tp=4, block_size=32))
        assert [t.tp_ratio(tp) for tp in (1, 2, 4, 8, 16)] == [4, 2, 1, -2, -4]
        assert [t.block_size_ratio(size) for size in (8, 16, 32)] == [4, 2, 1]
        for ask, size in ((t.tp_ratio, 3), (t.block_size_ratio, 64)):
            with pytest.raises(TopologyError, match="whole ratio"):
                ask(size)

    def test_pipeline_stages_are_asked_one_by_one(self) -> None:
        model = load_model("llama-3.1-8b")
        remote = EngineShape(tp=2, pp=2)
        t = topology(1, EngineShape(tp=4, pp=2), model, pp=1)
        for stage, layers in enumerate([(0, 16), (16, 32)]):
            t.register_remote_engine(
                "prefill",
                info(
                    2,
                    remote_pp_rank=stage,
                    start_layer=layers[0],
                    end_layer=layers[1],
                    remote_shape=remote,
                ),
            )
        assert t.source_ranks("prefill", 0) == []  # layers of our other stage
        assert t.source_ranks("prefill", 1) == [0]

    def test_dcp(self) -> None:
        model = one_layer(1, mla=True)
        for rank in range(4):
            t = topology(rank, EngineShape(tp=4, dcp=4), model)
            assert t.handshake_target_ranks(4, remote_dcp_size=4) == [rank]
        alone = topology(0, EngineShape(), model)
        assert alone.handshake_target_ranks(4, 4) == [0, 1, 2, 3]

    def test_description(self) -> None:
        t = topology(1)
        t.register_remote_engine("prefill", info(8, end_layer=0))
        text = t.describe("prefill")
        assert "[2, 3]" in text and "tp=8" in text and "'decode'" in text and "\n" not in text


class TestPartners:
    SHAPE, REMOTE = EngineShape(tp=3, block_size=24), EngineShape(tp=8, pp=2)

    def described(self, rank: Rank) -> TransferTopology:
        model = load_model("llama-3.1-8b")
        t = TransferTopology("d", model, self.SHAPE, rank)
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

    def test_a_rank_reads_from_some_of_its_partners(self) -> None:
        for rank in self.SHAPE.ranks:
            t = self.described(rank)
            for stage in range(2):
                spoken = {r.tp for r in t.partners("p") if r.pp == stage}
                assert sorted(spoken) == t.target_remote_ranks("p", stage)
                assert set(t.source_ranks("p", stage)) <= spoken

    def test_layers_that_only_one_side_has(self) -> None:
        whole, rank = load_model("llama-3.1-8b"), Rank(0, 0)
        (group,) = whole.groups
        draft = replace(group, name="draft", layers=(0, 1), role="draft")
        ours = replace(whole, groups=(group, draft))
        told = info(1, remote_shape=EngineShape(), remote_model=whole)
        strict = TransferTopology("d", ours, EngineShape(), rank)
        strict.register_remote_engine("p", told)
        with pytest.raises(IncompatibleError, match="group 'draft'"):
            strict.pair_with("p")
        lenient = TransferTopology("d", ours, EngineShape(), rank, frozenset({"draft"}))
        lenient.register_remote_engine("p", told)
        assert lenient.pair_with("p").model.groups == (group,)
        lacking = ours.beyond(lenient.pair_with("p").model)
        assert lacking is not None and lacking.groups == (draft,)
        assert whole.beyond(whole) is None


class TestMemory:
    """What an engine says of itself, and the memory that its ranks describe."""

    MODEL = load_model("llama-3.1-8b")
    SHAPE = EngineShape(tp=2, pp=2, block_size=64, kernel_block_size=16)

    def layout(self, shape: EngineShape, stage: int = 1) -> RankLayout:
        return RankLayout.build(self.MODEL, shape, Rank(stage, 0), 8)

    def test_the_record_of_a_stage(self) -> None:
        told = EngineTransferInfo.of_stage(
            self.SHAPE, self.MODEL, self.layout(self.SHAPE), [0], "i"
        )
        assert (told.start_layer, told.end_layer, told.stage) == (16, 32, 1)
        assert told.remote_block_len == 64 * 4 * 2 * 128 * 2  # tokens, heads, k and v, dim, bytes
        assert told.remote_physical_blocks_per_logical == 4
        assert "layers 16..31" in told.describe() and "4 physical blocks" in told.describe()
