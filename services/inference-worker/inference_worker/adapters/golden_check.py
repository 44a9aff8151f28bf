"""Does the engine compute what the model's weights say? Asked once, before anybody is served.

Kernels chosen for a machine can be wrong there without an error: bfloat16 attention by AMX gives fluent nonsense on some. So a fixed
prompt's tokens are scored by the engine and by the explicit forward of `treadle.nn`, in float32, and compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from inference_worker.domain.engine_port import RunningEngine
from inference_worker.domain.errors import StepFailed
from inference_worker.domain.request import Piece, Request, Sampling
from inference_worker.domain.request_leases import Leases
from treadle.contract.deadline import Deadline
from treadle.contract.errors import TreadleError
from treadle.nn.model import CausalLM

log = logging.getLogger("treadle.worker")
PROMPT_TOKENS, ANSWER_TOKENS = 48, 8  # several blocks of KV, and steps that decode from them
CHECK_SECONDS_MAX = 120.0  # of the engine's answer; a model of billions of numbers on two cores takes a while
STRIDE = 7919  # a prime: the prompt's tokens are spread over the vocabulary, whatever it is


class WrongAnswers(TreadleError):
    """The engine does not compute what the model's weights say."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the engine is from the explicit forward.

    logprob_difference: mean |difference| of the scored tokens' log-probabilities, prompt and answer
    choice_loss:        most that a token which the engine thought the likeliest is less likely than the forward's own likeliest, nats
    """

    logprob_difference: float
    choice_loss: float


async def check_answers(engine: RunningEngine, folder: Path, vocabulary: int, *, params_max: int, difference_max: float) -> None:
    """Raise WrongAnswers unless the engine agrees with the explicit forward of `folder`.

    params_max:     of a model with more parameters nothing is checked, and the log says so; 0: of none
    difference_max: largest mean |difference| of log-probabilities, and loss of a greedy choice, in nats
    """
    parameters = parameters_of(folder)
    if parameters > params_max:
        log.warning(
            "the engine's answers are not checked: the model is larger than golden_check_params_max",
            extra={"parameters": parameters, "golden_check_params_max": params_max},
        )
        return
    prompt = [1 + (STRIDE * place) % (vocabulary - 1) for place in range(PROMPT_TOKENS)]
    answer = await _answer(engine, prompt)
    agreement = await asyncio.to_thread(compare, folder, prompt, answer)  # the loop goes on hearing the engine
    told = {"logprob_difference": round(agreement.logprob_difference, 6), "choice_loss": round(agreement.choice_loss, 6)}
    if not agreement.logprob_difference <= difference_max or not agreement.choice_loss <= difference_max:
        raise WrongAnswers(
            f"the engine does not compute what the weights in {folder} say: log-probabilities differ by "
            f"{agreement.logprob_difference:.3g} nats in the mean, its choices are up to {agreement.choice_loss:.3g} nats below the "
            f"likeliest (golden_check_difference_max = {difference_max:g}); use --dtype float32, or see the traps in docs/vllm.md"
        )
    log.info("the engine's answers agree with the model's weights", extra=told)


def compare(folder: Path, prompt: Sequence[int], answer: Piece) -> Agreement:
    """Score what the engine scored with the explicit forward in float32. The model is loaded for this and let go."""
    tokens = [*prompt, *answer.token_ids]
    scored = [each.logprob for each in (*answer.prompt_logprobs, *answer.logprobs)]
    if len(scored) != len(tokens) - 1 or not all(map(math.isfinite, scored)):
        return Agreement(math.inf, math.inf)
    model = CausalLM.load(folder, torch.float32)
    places = torch.arange(len(tokens))
    hidden = model.forward(torch.tensor(tokens), places, [0, len(tokens)], [model.new_kv()])
    table = torch.log_softmax(model.logits(hidden[:-1]), dim=-1)
    own = table.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    difference = (own - torch.tensor(scored)).abs().mean()
    chosen = own[len(prompt) - 1 :]
    loss = (table[len(prompt) - 1 :].max(dim=-1).values - chosen).max()
    return Agreement(float(difference), float(loss))


def parameters_of(folder: Path) -> int:
    """Numbers in the weights of a model folder, from the headers of its files."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return count


async def _answer(engine: RunningEngine, prompt: Sequence[int]) -> Piece:
    sampling = Sampling(max_tokens=ANSWER_TOKENS, ignore_eos=True, top_logprobs=0, prompt_logprobs=True)
    request = Request(
        tuple(prompt), sampling, request_id="golden-check", cache_salt="golden-check", deadline=Deadline.after(CHECK_SECONDS_MAX)
    )
    answer = Piece()
    async for piece in engine.begin(request, Leases()).pieces():
        answer.add(piece)
    if answer.finish is None:
        raise StepFailed("the engine ended its first answer without saying so")
    return answer
