"""prompt_embeds: the model gets no ids at all then; n-grams come from the runner's own, and vectors take part in none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.nn.model import CausalLM
from treadle.vllm import MemoryConfig

Verses = Callable[..., list[int]]
TOKENS = 6


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Any], smollm_folder: Path, pool: Any) -> Any:
    config = MemoryConfig(engram_pool=pool.address, fusion="on", default_memory="smollm2-demo", wait_seconds_max=10.0)
    return engines(smollm_folder, config, enable_prompt_embeds=True, max_num_batched_tokens=48)


def vectors(smollm: CausalLM, ids: list[int]) -> torch.Tensor:
    return smollm.weights.embedding[torch.tensor(ids)].clone()


def test_ids_vectors_and_both_in_one_batch(
    engine: Any, embedded: Any, smollm: Any, explicit: Callable[..., Any], verses: Verses
) -> None:
    ids = [verses(70, first) for first in (0, 300, 600)]
    mixed = np.ones(70, dtype=bool)
    mixed[20:29] = False
    whole = {"prompt_embeds": vectors(smollm, ids[1])}
    both = {"prompt_embeds": vectors(smollm, ids[2]), "prompt_token_ids": ids[2], "prompt_is_token_ids": mixed.tolist()}
    plain, of_vectors, of_both = engine.say((ids[0], None), (whole, None), (both, None), tokens=TOKENS)
    plain.same_as(embedded.say(ids[0], "smollm2-demo", tokens=TOKENS))
    of_vectors.same_as(explicit("smollm2-demo", ids[1], np.zeros(70, dtype=bool), of_vectors.tokens))
    of_both.same_as(explicit("smollm2-demo", ids[2], mixed, of_both.tokens))
    assert not any(answer.degraded for answer in (plain, of_vectors, of_both))
    as_ids = embedded.say(ids[1], "smollm2-demo", tokens=TOKENS)  # a vector is no token: it is not what its id would be
    assert max(abs(a - b) for a, b in zip(as_ids.logprobs, of_vectors.logprobs, strict=True)) > 1e-3
