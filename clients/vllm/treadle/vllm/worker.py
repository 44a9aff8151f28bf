"""vLLM's workers with memories: `--worker-cls treadle.vllm.worker.EngramWorker` is the one of this platform."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker, gpu_worker

from treadle.contract.errors import InvalidArgument, TreadleError
from treadle.vllm.batch import EngramBatch
from treadle.vllm.config import Choice
from treadle.vllm.runner import EngramCPUModelRunner
from treadle.vllm.support import check_supported
from treadle.vllm.verdicts import put_verdicts


class _TellsOfMemories:
    """What both workers add. What other processes may ask by `collective_rpc` returns JSON values."""

    @property
    def _engram(self) -> EngramBatch:
        """Of the model runner."""
        raise NotImplementedError

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See Worker; the output carries what the step did to its requests."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]  # of the vLLM class that this is mixed into
        return put_verdicts(output, self._engram.take_verdicts())

    def take_engram_reports(self) -> dict[str, Any]:
        """EngineReports as values: what layers and memories did; tickets are told once."""
        return self._engram.take_reports().to_dict()

    def open_engram_memory(self, memory: str) -> str:
        """Begin to open NAME@VERSION, so that no step has to wait for it: `open`, `opening`, or why it cannot be had. At once."""
        try:
            choice = Choice.parse(memory, "memory")
        except InvalidArgument as error:
            return f"{type(error).__name__}: {error}"
        return "open" if choice is None else self._engram.open_ahead(choice)

    def close_engram_memory(self, memory: str) -> None:
        """NAME@VERSION, which open_engram_memory opened, is needed no more: it is closed when no request uses it. At once."""
        with suppress(InvalidArgument):  # then it was not opened either
            choice = Choice.parse(memory, "memory")
            if choice is not None:
                self._engram.let_go(choice)

    def open_treadle_prefix(self, what: str, checked: bool = False) -> str:
        """Open a long prefix, so that requests may choose it: its NAME@VERSION, or why it cannot be had (`KIND: why`).

        See Prefixes.open: what, checked. Milliseconds; without `checked` its bytes, and once the model's, are read.
        """
        prefixes = self._engram.prefixes
        try:
            if prefixes is None:
                raise InvalidArgument("prefix: this engine's attention does not merge; long prefixes need vLLM on a CPU")
            return prefixes.open(what, checked=checked)
        except TreadleError as error:
            return f"{type(error).__name__}: {error}"

    def close_treadle_prefix(self, what: str) -> None:
        """NAME@VERSION, which open_treadle_prefix opened, is needed no more: it is closed when no request uses it. At once."""
        if self._engram.prefixes is not None:
            with suppress(InvalidArgument):  # then it was not opened either
                self._engram.prefixes.let_go(what)

    def shutdown(self) -> None:
        """See Worker."""
        if getattr(self, "model_runner", None) is not None:
            self._engram.close()
        super().shutdown()  # type: ignore[misc]  # of the vLLM class that this is mixed into


class EngramCPUWorker(_TellsOfMemories, cpu_worker.CPUWorker):
    """Runs EngramCPUModelRunner."""

    _store: Path | None = None

    def init_device(self) -> None:
        """See CPUWorker. A single rank meets nobody: a file keeps its store off the network, where torch listens on every address."""
        if self.parallel_config.world_size == 1:
            self._store = Path(tempfile.mkdtemp(prefix="treadle-vllm-"))
            self.distributed_init_method = f"file://{self._store}/store"
        plain = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = EngramCPUModelRunner  # init_device makes the runner and offers no other way to say which
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = plain

    def shutdown(self) -> None:
        """See Worker."""
        super().shutdown()
        if self._store is not None:
            shutil.rmtree(self._store, ignore_errors=True)

    @property
    def _engram(self) -> EngramBatch:
        runner = self.model_runner
        assert isinstance(runner, EngramCPUModelRunner), "init_device made it"
        return runner.engram


class EngramGPUWorker(_TellsOfMemories, gpu_worker.Worker):
    """Runs vLLM's second model runner, whose state for our models is EngramModelState. Not run on a GPU yet."""

    def init_device(self) -> None:
        """See Worker. Raises InvalidArgument where memories would be wrong, or the first model runner would run."""
        check_supported(self.vllm_config)
        super().init_device()
        if not self.use_v2_model_runner:
            raise InvalidArgument(
                "treadle.vllm: on GPUs memories need vLLM's second model runner: start it with VLLM_USE_V2_MODEL_RUNNER=1"
            )

    @property
    def _engram(self) -> EngramBatch:
        from treadle.vllm.model_state import EngramModelState

        state = self.model_runner.model_state
        assert isinstance(state, EngramModelState), "EngramModel.get_model_state_cls says so"
        return state.engram


EngramWorker = EngramGPUWorker if current_platform.is_cuda() else EngramCPUWorker
