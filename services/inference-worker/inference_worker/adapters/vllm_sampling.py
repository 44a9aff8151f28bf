"""A request as vLLM wants it: sampling parameters, and what our scheduler and model runner read of it."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.request import Request

NO_MEMORY = "none"


def sampling_params(
    request: Request, tokens_max: int, stops: frozenset[int], memory: EngramMemory | None, prefix: str = "", *, exact: bool = False
) -> SamplingParams:
    """vLLM's parameters for a request.

    prefix: NAME@VERSION of the long prefix that it stands behind, "": none; exact: behind its exact KV
    tokens_max: of the answer; stops: every token that ends it, the model's own included
    Stop strings are left out: they are looked for in the text, which vLLM does not make here.
    """
    wanted = request.sampling
    return SamplingParams(
        max_tokens=tokens_max, temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k, min_p=wanted.min_p,
        seed=wanted.seed, stop_token_ids=sorted(stops), ignore_eos=True,  # the end tokens are among the stops, if they count
        logit_bias=dict(wanted.logit_bias) or None, presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty, repetition_penalty=wanted.repetition_penalty or 1.0,
        logprobs=wanted.top_logprobs, prompt_logprobs=(wanted.top_logprobs or 0) if wanted.prompt_logprobs else None,
        detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True,
        extra_args={"treadle": memory_choice(request, memory) | prefix_choice(prefix, exact=exact)},
    )  # fmt: skip


def memory_choice(request: Request, memory: EngramMemory | None) -> dict[str, Any]:
    """What `treadle.vllm` reads: which version, and what to do about late rows."""
    policy, stops_in_text = request.policy, bool(request.sampling.stop)
    return {
        "engram": NO_MEMORY if memory is None else f"{memory.model.name}@{memory.version}",
        "wait_seconds_max": policy.wait_seconds_max, "late": policy.late.value,
        "each_output": stops_in_text,  # a stop string ends it here, before vLLM's last output would bring the outcome
    }  # fmt: skip


def prefix_choice(prefix: str, *, exact: bool) -> dict[str, Any]:
    """What `treadle.vllm` reads: the prefix, and that a request off its dictionary's task will be asked again."""
    return {"prefix": prefix, "prefix_exact": exact, "begins_anew": not exact} if prefix else {}
