# SPDX-License-Identifier: Apache-2.0
"""kvferry's connectors with their calls timed, for `python -m benchmarks.handover`.

`FreeConnector` also takes requests with the parameter `FREE`: it says that their whole prompt is
elsewhere, and in the next step that it has come, though nothing has. Their answers are nonsense;
what they cost other requests is what vLLM itself does for a prompt that it need not compute.
"""

from __future__ import annotations

from typing import Any

from benchmarks.timed import FREE, timed
from kvferry import vllm as ours

FerryConnector = timed(ours.FerryConnector)


class FreeConnector(FerryConnector):  # type: ignore[misc, valid-type]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ordered: list[str] = []  # the scheduler's part: for the next step
        self._free: list[str] = []  # the worker's part: of this step

    def on_new_request(self, request: Any) -> None:
        if not _is_free(request):
            super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not _is_free(request):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not _is_free(request):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens:
            self._ordered.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.free, self._ordered = self._ordered, []
        return metadata

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._free += connector_metadata.free

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving |= set(self._free)
        self._free.clear()
        return results


def _is_free(request: Any) -> bool:
    return FREE in (request.kv_transfer_params or {})
