"""Trains LoRA with `peft` for a budget of CPU seconds and measures it. Runs in an environment of its own, so it imports no treadle.

    python lora_script.py --data BLOCKS.npz --model FOLDER --out RESULT.json --rank R --rate 1e-3 --cpu-seconds 600 --seed 0 \
        --measure validation …

Reads: `train` and `mix`, int64 [n, L], in the order of training, and one array for each set. Writes: negative log-likelihood
in nats of each block of each measured set, what was trained, and what was asked for (`asked`). One thread. The learning rate is constant for the first half of
the budget, then falls linearly to a tenth, as the memory's does; steps are of as many blocks as the memory's, and in training the
softmax goes over the tokens that occur, as the memory's does. Measuring goes over the whole vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCKS_PER_STEP, MIX_EVERY = 4, 5
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CLIP_NORM = 1.0


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("data", Path), ("model", Path), ("out", Path), ("rank", int), ("rate", float), ("cpu-seconds", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    with np.load(arguments.data) as data:
        blocks = {name: torch.from_numpy(data[name]) for name in data.files}
    model = adapted(arguments.model, arguments.rank)
    trained = train(model, blocks["train"], blocks["mix"], arguments.rate, arguments.cpu_seconds)
    sets = {name: measure(model, blocks[name]) for name in arguments.measure}
    import peft  # type: ignore[import-not-found,unused-ignore]

    about = {"peft": peft.__version__, "torch": torch.__version__}
    about |= asked(arguments.rank, arguments.rate, arguments.cpu_seconds, arguments.seed, arguments.data)
    result = {"sets": sets, **trained, **about, "parameters": sum(p.numel() for p in parameters(model))}
    partial = arguments.out.with_name(arguments.out.name + ".partial")
    partial.write_text(json.dumps(result))
    partial.rename(arguments.out)


def asked(rank: int, rate: float, cpu_seconds: float, seed: int, data: Path) -> dict[str, Any]:
    """What a result is of, as it stands in it: a result that says otherwise, or nothing, is of another training."""
    return {
        "rank": rank, "rate": rate, "cpu_seconds_budget": cpu_seconds, "seed": seed, "data_digest": data_digest(data),
    }  # fmt: skip


def data_digest(path: Path) -> str:
    """sha256 over every array of an .npz by name, shape and values."""
    digest = hashlib.sha256()
    with np.load(path) as arrays:
        for name in sorted(arrays.files):
            values = np.ascontiguousarray(arrays[name], dtype="<i8")
            digest.update(f"{name}\0{values.shape}\0".encode())
            digest.update(values.data)
    return digest.hexdigest()


def adapted(folder: Path, rank: int) -> Any:
    """The model in bf16 with LoRA of one rank on every matrix of every layer; scale 2, the usual choice (alpha = 2 rank)."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    base.config.use_cache = False
    return get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    )


def parameters(model: Any) -> list[Tensor]:
    """What is trained; fp32, shipped as bf16."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: Any, blocks: Tensor, mix: Tensor, rate: float, cpu_seconds: float) -> dict[str, Any]:
    """AdamW until the CPU seconds are spent; after the last block it begins again."""
    head = Head(model, torch.from_numpy(np.unique(np.concatenate((blocks.flatten().numpy(), mix.flatten().numpy())))))
    optimiser = torch.optim.AdamW(parameters(model), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    began, tokens, steps, losses = time.process_time(), 0, 0, []
    for text, mixed in steps_of(blocks, mix):
        done = (time.process_time() - began) / cpu_seconds
        if done >= 1.0:
            break
        for group in optimiser.param_groups:
            group["lr"] = rate * (1.0 if done < 0.5 else 1.0 - 0.9 * (done - 0.5) / 0.5)
        total = 0.0
        for block in blocks_of(text, 1):  # one block at a time: logits of a whole step would take 800 MB
            loss = head.loss(block) / (text.numel() - len(text))
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters(model), CLIP_NORM)
        optimiser.step()
        optimiser.zero_grad()
        steps, tokens = steps + 1, tokens + (0 if mixed else text.numel())
        losses.append(total)
    return {
        "tokens": tokens, "passes": tokens / blocks.numel(), "steps": steps, "cpu_seconds": time.process_time() - began,
        "loss_first": losses[:4], "loss_last": losses[-4:],
    }  # fmt: skip


def steps_of(blocks: Tensor, mix: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Steps without end: blocks in their order, every MIX_EVERY-th step one block of the other text."""
    others = itertools.cycle(blocks_of(mix, 1)) if len(mix) else None
    count = 0
    while True:
        for text in blocks_of(blocks, BLOCKS_PER_STEP):
            if others is not None and count % MIX_EVERY == MIX_EVERY - 1:
                yield next(others), True
                count += 1
            yield text, False
            count += 1


class Head:
    """The loss of training: the model's last hidden state against those rows of the output matrix whose tokens occur."""

    def __init__(self, model: Any, vocabulary: Tensor) -> None:
        base = model.get_base_model()  # LoRA is in its modules already
        self.body, weight = base.model, base.lm_head.weight.detach()
        self.weight = weight[vocabulary].contiguous()
        self.numbers = torch.full((len(weight),), -1, dtype=torch.int64)
        self.numbers[vocabulary] = torch.arange(len(vocabulary))

    def loss(self, block: Tensor) -> Tensor:
        """Summed negative log-likelihood of a block [1, L], differentiable."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.body(input_ids=block).last_hidden_state[0, :-1] @ self.weight.t()
        return torch.nn.functional.cross_entropy(logits.float(), self.numbers[block[0, 1:]], reduction="sum")


def blocks_of(blocks: Tensor, count: int) -> tuple[Tensor, ...]:
    """Groups of `count` blocks, the last one smaller."""
    return torch.split(blocks, count)


def loss_of(model: Any, block: Tensor) -> Tensor:
    """Negative log-likelihood of every token but the first of one block [1, L]; [L - 1] fp32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=block).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), block[0, 1:], reduction="none")


@torch.no_grad()
def measure(model: Any, blocks: Tensor) -> list[float]:
    """Nats of each block, over the whole vocabulary."""
    model.eval()
    return [float(loss_of(model, block).sum(dtype=torch.float64)) for block in blocks_of(blocks, 1)]


if __name__ == "__main__":
    main()
