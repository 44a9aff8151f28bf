"""What this plugin overrides or reads of vLLM and vLLM does not promise. A new vLLM fails here first, and each failure names a hook."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from importlib import import_module
from typing import Any

import pytest

from treadle.contract.errors import ProtocolMismatch
from treadle.vllm import SCHEDULER_CLS, VLLM_VERSION, WORKER_CLS
from treadle.vllm.plugin import ARCHITECTURES, check_version, register

CPU, GPU = "vllm.v1.worker.cpu_model_runner.CPUModelRunner", "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
SCHEDULER, POOL = "vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.block_pool.BlockPool"
MANAGER, COORDINATOR = "vllm.v1.core.kv_cache_manager.KVCacheManager", "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"
STATE = "vllm.v1.worker.gpu.model_states.default.DefaultModelState"


def found(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (CPU, "__init__", ["self", "vllm_config", "device"]),
        (CPU, "load_model", ["self", "load_dummy_weights"]),
        (CPU, "initialize_kv_cache", ["self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"]),
        (GPU, "_prepare_inputs", ["self", "scheduler_output", "num_scheduled_tokens"]),
        (GPU, "_model_forward", ["self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"]),
        (GPU, "_on_request_state_removed", ["self", "req_id", "req_state"]),
        (
            CPU_ATTENTION, "forward",
            ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"],
        ),
        ("vllm.v1.worker.gpu_worker.Worker", "sample_tokens", ["self", "grammar_output"]),
        ("vllm.v1.worker.gpu_worker.Worker", "shutdown", ["self"]),
        ("vllm.v1.worker.cpu_worker.CPUWorker", "init_device", ["self"]),
        (SCHEDULER, "add_request", ["self", "request"]),
        (SCHEDULER, "update_from_output", ["self", "scheduler_output", "model_runner_output"]),
        (SCHEDULER, "finish_requests", ["self", "request_ids", "finished_status"]),
        (SCHEDULER, "_free_request", ["self", "request", "delay_free_blocks"]),
        (SCHEDULER, "shutdown", ["self"]),
        (MANAGER, "evict_blocks", ["self", "block_ids"]),
        (MANAGER, "get_block_ids", ["self", "request_id"]),
        (COORDINATOR, "cache_blocks", ["self", "request", "num_computed_tokens"]),
        (POOL, "_maybe_evict_cached_block", ["self", "block"]),
        ("vllm.v1.request.Request", "update_block_hashes", ["self"]),
        (STATE, "prepare_inputs", ["self", "input_batch", "req_states"]),
        (STATE, "prepare_dummy_inputs", ["self", "num_reqs", "num_tokens"]),
        (STATE, "add_request", ["self", "req_index", "new_req_data"]),
        (STATE, "remove_request", ["self", "req_id"]),
        ("vllm.v1.worker.gpu.model_states.interface.ModelState", "initialize_kv_cache", ["self", "kv_cache_config", "block_tables"]),
    ],
)  # fmt: skip
def test_a_hook_takes_what_we_give_it(owner: str, name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(found(owner), name)).parameters) == parameters, f"{owner}.{name}"


@pytest.mark.parametrize("kind", ["llama.LlamaDecoderLayer", "qwen2.Qwen2DecoderLayer", "qwen3.Qwen3DecoderLayer"])
def test_a_decoder_layer_takes_positions_stream_and_residual(kind: str) -> None:
    layer = found(f"vllm.model_executor.models.{kind}")
    assert list(inspect.signature(layer.forward).parameters) == ["self", "positions", "hidden_states", "residual"], kind


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (GPU, "self._on_request_state_removed("),
        (GPU, "self.requests[req_id] = req_state"),
        (GPU, "self._model_forward("),
        (GPU, "self._prepare_inputs("),
        (GPU, "input_ids=input_ids,\n                positions=positions,"),
        (CPU_ATTENTION, "s_aux=self.sinks"),
        (CPU_ATTENTION, "query=query[:num_actual_tokens]"),
        ("vllm.v1.worker.cpu_worker.CPUWorker", "CPUModelRunner(self.vllm_config"),
        (SCHEDULER, "kv_transfer_params, ec_transfer_params = self._free_request(request)"),
        (SCHEDULER, "request.num_in_flight_tokens -= num_tokens_scheduled"),
        (MANAGER, "self.coordinator.cache_blocks(request, num_tokens_to_cache)"),
        ("vllm.v1.engine.core.EngineCore", "self._process_aborts_queue()"),
        ("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "**self.model_state.prepare_inputs(input_batch, self.req_states)"),
    ],
)
def test_vllm_still_calls_a_hook_where_we_count_on_it(owner: str, said: str) -> None:
    assert said in inspect.getsource(found(owner)), f"{owner}: {said}"


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        ("vllm.v1.engine.EngineCoreOutput", {"request_id", "new_token_ids", "finish_reason", "events", "trace_headers", "kv_transfer_params"}),
        ("vllm.v1.engine.EngineCoreOutputs", {"outputs"}),
    ],
)  # fmt: skip
def test_an_output_has_the_fields_that_we_fill(owner: str, fields: set[str]) -> None:
    assert fields <= set(found(owner).__struct_fields__), owner


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        ("vllm.v1.core.sched.output.NewRequestData", {"req_id", "sampling_params"}),
        ("vllm.v1.worker.gpu.input_batch.InputBatch", {"req_ids", "num_reqs", "num_tokens", "idx_mapping", "query_start_loc_np", "input_ids"}),
        ("vllm.v1.outputs.ModelRunnerOutput", {"req_ids", "sampled_token_ids"}),
    ],
)  # fmt: skip
def test_a_dataclass_has_the_fields_that_we_read(owner: str, fields: set[str]) -> None:
    assert fields <= {field.name for field in dataclasses.fields(found(owner))}, owner


def test_an_output_of_the_model_takes_our_verdicts_along_through_a_pickle() -> None:
    import pickle

    from treadle.vllm.outcomes import RequestOutcome, StepVerdict
    from treadle.vllm.verdicts import put_verdicts, verdicts_of

    output = put_verdicts(
        found("vllm.v1.outputs.ModelRunnerOutput")(["a"], {"a": 0}), {"a": StepVerdict(RequestOutcome(tickets=2), 5)}
    )
    copied = pickle.loads(pickle.dumps(output))  # noqa: S301
    assert verdicts_of(copied) == {"a": StepVerdict(RequestOutcome(tickets=2), 5)}
    assert verdicts_of(found("vllm.v1.outputs.EMPTY_MODEL_RUNNER_OUTPUT")) == {}


def test_the_classes_that_a_deployment_names_are_vllms_own_with_ours_before_them() -> None:
    assert issubclass(found(SCHEDULER_CLS), found(SCHEDULER))
    assert issubclass(found(WORKER_CLS), found("vllm.v1.worker.cpu_worker.CPUWorker"))
    assert issubclass(found("treadle.vllm.worker.EngramGPUWorker"), found("vllm.v1.worker.gpu_worker.Worker"))
    assert issubclass(found("treadle.vllm.model_state.EngramModelState"), found(STATE))


def test_our_log_lines_go_where_vllms_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.getLogger("treadle"), logging.getLogger("vllm")
    for logger in (ours, logging.getLogger()):
        monkeypatch.setattr(logger, "handlers", [])
    register()
    register()
    assert theirs.handlers
    assert ours.handlers == theirs.handlers


def test_registering_names_all_models_and_refuses_another_vllm() -> None:
    from vllm import ModelRegistry

    register()
    register()
    assert {f"Engram{name}" for name in ARCHITECTURES} <= set(ModelRegistry.get_supported_archs())
    check_version(f"{VLLM_VERSION}+cpu")
    with pytest.raises(ProtocolMismatch, match=rf"{VLLM_VERSION}.*0\.33\.0"):
        check_version("0.33.0")


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    assert "treadle.vllm.plugin:register" in {point.value for point in entry_points(group="vllm.general_plugins")}


def test_attention_on_a_cpu_stays_opaque_to_a_compiled_graph_and_writes_its_keys_before_it_runs() -> None:
    assert found("vllm.platforms.cpu.CpuPlatform").opaque_attention_op()
    assert not found("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend").forward_includes_kv_cache_update


def test_a_request_that_the_runner_keeps_says_how_long_it_may_become() -> None:
    state = found("vllm.v1.worker.gpu_input_batch.CachedRequestState")
    assert {"sampling_params", "prompt_token_ids"} <= {field.name for field in dataclasses.fields(state)}
    assert "self.num_prompt_tokens = " in inspect.getsource(state.__post_init__)
