"""vLLM's scheduler with memories: `--scheduler-cls treadle.vllm.scheduler.EngramScheduler`.

Owns which version a request keeps, salts that keep memories apart in the prefix cache, that no block made with rows missing is
shared, requests that end because their memory failed them, and their outcomes on the way to the caller. Does not know rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import Late
from treadle.vllm.config import KEY, Choice, MemoryConfig, RequestChoice, pinned
from treadle.vllm.current_versions import CurrentVersions
from treadle.vllm.outcomes import Failure, RequestOutcome, StepVerdict
from treadle.vllm.salt import cache_salt, memory_identity, prefix_identity
from treadle.vllm.verdicts import verdicts_of


@dataclass(slots=True)
class _Known:
    """A request here. clean_tokens: of its beginning that may be shared, None: all; fails: its policy when rows are missing;
    each_output: whether its outcome goes with all of its outputs."""

    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    clean_tokens: int | None = None
    fails: bool = False
    each_output: bool = False


class EngramScheduler(Scheduler):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory_config = MemoryConfig.of(self.vllm_config.additional_config)
        self._current = CurrentVersions(self._memory_config)
        self._known: dict[str, _Known] = {}
        self._left_in_flight: dict[str, list[int]] = {}  # blocks of requests that were ended while their step ran
        self._cache_blocks = self.kv_cache_manager.coordinator.cache_blocks
        self.kv_cache_manager.coordinator.cache_blocks = self._cache_clean_blocks

    def add_request(self, request: Request) -> None:
        """See Scheduler; its memory's version is fixed, and its blocks are those of this memory alone."""
        if request.request_id not in self.requests:
            self._known[request.request_id] = self._begun(request)
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See Scheduler; before anything else, what the step did to its requests' memories."""
        self._hear(verdicts_of(model_runner_output))
        failed = self._end_failed()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._tell_outcome(output)
        for client, output in failed:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def shutdown(self) -> None:
        """See Scheduler."""
        self._current.close()
        super().shutdown()

    def _begun(self, request: Request) -> _Known:
        params = request.sampling_params
        if params is None:
            return _Known()
        try:
            wanted = RequestChoice.of(params.extra_args, self._memory_config)
        except InvalidArgument:
            return _Known()  # it runs one step without a memory, in which the model's process says the same
        known = _Known(fails=wanted.policy.late is Late.FAIL, each_output=wanted.each_output)
        identities = []
        if wanted.memory is not None:
            name = wanted.memory.name
            version = wanted.memory.version or self._current.of(name)
            if version and version != wanted.memory.version:
                params.extra_args = pinned(params.extra_args, Choice(name, version))
            # Without a version the model's process takes the one that is current then: nobody else can know which, so nobody shares.
            identities.append(memory_identity(name, version or uuid.uuid4().hex, self._memory_config.fusion))
        if wanted.prefix is not None:
            identities.append(prefix_identity(str(wanted.prefix), exact=wanted.prefix_exact))
        for identity in identities:
            request.cache_salt = cache_salt(request.cache_salt or "", identity)
        if identities:
            request.block_hashes = []
            request.update_block_hashes()
        return known

    def _hear(self, verdicts: Mapping[str, StepVerdict]) -> None:
        dirty: dict[str, int] = {}
        for request_id, verdict in verdicts.items():
            known = self._known.get(request_id)
            if known is not None:
                tainted = known.outcome.degraded and not verdict.outcome.degraded
                known.outcome = replace(verdict.outcome, degraded=True) if tainted else verdict.outcome
            if verdict.dirty_from is not None:
                dirty[request_id] = verdict.dirty_from
        if dirty:
            self._unshare(dirty)
        self._left_in_flight.clear()

    def _unshare(self, dirty: dict[str, int]) -> None:
        """Take out of the prefix cache what was made with rows missing, and all that was made from it in this same step.

        dirty: for each request the position of its first token with rows missing
        """
        fresh = {
            request_id: position
            for request_id, position in dirty.items()
            if request_id in self._left_in_flight or not self._is_marked(request_id, position)
        }
        if not fresh:
            return  # a pool that is gone: every step of every request, and nothing of theirs is in the cache any more
        tables = {request_id: self._blocks_of(request_id) for request_id in self.requests} | self._left_in_flight
        tainted: set[int] = set()
        while fresh:
            for request_id, position in fresh.items():
                tainted.update(tables.get(request_id, [])[position // self.block_size :])
                self._mark(request_id, position // self.block_size * self.block_size)
            firsts = {
                request_id: next((i for i, block in enumerate(own) if block in tainted), None) for request_id, own in tables.items()
            }
            fresh = {
                request_id: first * self.block_size
                for request_id, first in firsts.items()
                if first is not None and not self._is_marked(request_id, first * self.block_size)
            }
        self.kv_cache_manager.evict_blocks(tainted)

    def _mark(self, request_id: str, position: int) -> None:
        """From this position on, where a block begins, nothing of a request is shared any more; it is degraded, and so fails if it
        asked to."""
        known = self._known.get(request_id)
        if known is None:
            return
        known.clean_tokens = position if known.clean_tokens is None else min(position, known.clean_tokens)
        if known.outcome.degraded or known.outcome.error is not None:
            return
        known.outcome = replace(known.outcome, degraded=True)
        if known.fails:
            message = "it continues from a prompt that another request computed in the same step, with rows missing; try again"
            known.outcome = replace(known.outcome, error=Failure("Unavailable", message))

    def _is_marked(self, request_id: str, position: int) -> bool:
        known = self._known.get(request_id)
        return known is None or (known.clean_tokens is not None and known.clean_tokens <= position)

    def _blocks_of(self, request_id: str) -> list[int]:
        groups = self.kv_cache_manager.get_block_ids(request_id)
        return list(groups[0]) if groups else []

    def _end_failed(self) -> list[tuple[int, EngineCoreOutput]]:
        """End the requests whose memory failed them, before their step's token counts; what their callers are told."""
        failing = {request_id: known.outcome for request_id, known in self._known.items() if known.outcome.error is not None}
        if not failing:
            return []
        ended = self.finish_requests(failing, RequestStatus.FINISHED_ERROR)
        return [
            (
                request.client_index,
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                    kv_transfer_params={KEY: failing[request.request_id].to_dict()},
                ),
            )
            for request in ended
        ]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """See Scheduler; the request's outcome goes with its last output."""
        known = self._known.pop(request.request_id, None)
        if request.num_in_flight_tokens > 0:
            self._left_in_flight[request.request_id] = self._blocks_of(request.request_id)
        params, others = super()._free_request(request, *args, **kwargs)
        if known is not None and known.outcome != RequestOutcome():
            params = (params or {}) | {KEY: known.outcome.to_dict()}
        return params, others

    def _tell_outcome(self, output: EngineCoreOutput) -> None:
        known = self._known.get(output.request_id)
        if known is not None and (known.outcome.degraded or known.each_output):
            output.kv_transfer_params = (output.kv_transfer_params or {}) | {KEY: known.outcome.to_dict()}

    def _cache_clean_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """In place of the coordinator's cache_blocks: what may not be shared never enters the prefix cache."""
        known = self._known.get(request.request_id)
        if known is not None and known.clean_tokens is not None:
            num_computed_tokens = min(num_computed_tokens, known.clean_tokens)
        self._cache_blocks(request, num_computed_tokens)
