"""vLLM's loop around its real scheduler, for engines of tests that have no model."""

from __future__ import annotations

from typing import Any


class VllmLoop:
    """Steps as vLLM's engine core does. So an engine that vLLM takes for idle does not step.

    A subclass has a `scheduler`, runs its steps (`_run_model`), reports them (`_report`) and aborts
    requests (`abort`).
    """

    scheduler: Any

    def __init__(self, *, asynchronous: bool) -> None:
        self.leaving: list[str] = []  # requests to be aborted while the next step runs
        self._asynchronous = asynchronous
        self._in_flight: list[tuple[Any, Any]] = []  # steps, with their results

    def step(self, *, throttle: bool = False) -> None:
        """One turn of vLLM's loop, unless the engine is idle; an asynchronous scheduler is told of
        a step one step later. `throttle`: other data-parallel ranks compute no prefills now."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule(throttle)
            self._in_flight.append((output, self._run_model(output)))
            if len(self._in_flight) <= self._asynchronous and (
                output.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return
        elif not self._in_flight:
            return
        while self.leaving:
            self.abort(self.leaving.pop())
        self._report(*self._in_flight.pop(0))

    def abort(self, request_id: str) -> None:
        raise NotImplementedError

    def _run_model(self, output: Any) -> Any:
        raise NotImplementedError

    def _report(self, output: Any, results: Any) -> None:
        raise NotImplementedError
