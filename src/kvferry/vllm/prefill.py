"""What of a request is handed over: how far a prefill goes, and which blocks of it count.

Recurrent states have no positions. A decode engine that gets the state after all of a prompt could
not compute the prompt's last token (to sample from) without applying it twice, so the prefill stops
one token short, and the decode engine computes that one itself. Drafters that read ahead (several
MTP modules) want more. A state lives in one block: the last of its table, but for the blocks behind
it in which speculation tries things out.

In-tree connectors do the same. Under a MultiConnector a prompt must be cut once: whoever cuts marks
the request, as in-tree connectors do among themselves. Our tickets are for whole prompts, so ours
must see them first; an engine that is configured otherwise does not start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.errors import DescriptionError
from kvferry.vllm.multiconnector import CUTTING, CUTTING_ONE, Siblings
from kvferry.vllm.specs import group_spec, is_state

CUT = "_p_side_truncated"  # vLLM's mark, in the request's parameters


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Facts of one engine, the same on P and D where their models are."""

    held_back: int = 0  # tokens of a prompt that the decode engine computes
    # of each table: blocks for speculation behind a state; None where tokens are kept, not a state
    scratch: tuple[int | None, ...] = ()
    cache_blocks: int = 0  # of this engine; 0: not known

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> HandedOver:
        specs = [group_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        scratch = tuple(int(s.num_speculative_blocks) if is_state(s) else None for s in specs)
        has_states = any(blocks is not None for blocks in scratch)
        ahead = int(vllm_config.num_prefill_lookahead_tokens) - 1
        return cls(max(int(has_states), ahead, 0), scratch, int(kv_cache_config.num_blocks))

    def require_whole_prompts(self, siblings: Siblings) -> None:
        """Refuse siblings that would cut a prompt before us, or not as we do."""
        if not self.held_back:
            return
        why = f"of this model's prompts the last {self.held_back} tokens are left to decode engines"
        if early := sorted(set(siblings.ahead) & set(CUTTING)):
            raise DescriptionError(
                f"{why}; {', '.join(early)} comes before kvferry in MultiConnector's `connectors` "
                "and cuts prompts too, so that kvferry never sees them whole: list kvferry first"
            )
        other = sorted(set(siblings.others) & set(CUTTING_ONE))
        if self.held_back > 1 and other:
            raise DescriptionError(
                f"{why}, and {', '.join(other)} leaves one at most: their decode engines would "
                "take what was computed for more than it is. Do not run both in one engine"
            )

    def tables(self, block_ids: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        """A request's block tables, those of states cut down to the one block that counts."""
        tables = tuple(tuple(ids) for ids in block_ids)
        if not self.scratch:
            return tables
        return tuple(
            ids if scratch is None else ids[: max(1, len(ids) - scratch)][-1:]
            for ids, scratch in zip(tables, self.scratch, strict=True)
        )

    def stop_short(self, request: Any) -> None:
        """Let a prefill end before the tokens that are held back."""
        if not self.held_back or request.num_prompt_tokens <= self.held_back:
            return
        del request.prompt_token_ids[-self.held_back :]
        del request._all_token_ids[-self.held_back :]
        request.num_prompt_tokens -= self.held_back
        request.max_tokens = 1
        request.kv_transfer_params[CUT] = True  # siblings leave it at that
        request.block_hashes.clear()  # of blocks that may not be whole any more
        request.update_block_hashes()

    def tokens(self, request: Any) -> int:
        """How many tokens of a request a prefill engine with this model hands over."""
        return max(0, int(request.num_prompt_tokens) - self.held_back)

    def reaches_too_far(self, tokens: int, prompt_tokens: int) -> bool:
        """Whether what was prefilled leaves this engine less to compute than it must."""
        return tokens > prompt_tokens - self.held_back
