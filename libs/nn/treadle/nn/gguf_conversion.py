"""Turns one GGUF file into a Hugging Face model folder (bf16 safetensors); run as a program of its own.

    python -m treadle.nn.gguf_conversion FOLDER FILE OUT

A separate process, because transformers needs twice the model's memory here, prints bars and logs, and leaves globals
behind. Prints one line `<fraction> <step>` per step on stdout. Does not fetch, check digests or publish (`model_fetch`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def convert(folder: Path, file: str, out: Path) -> None:
    """Dequantise `folder/file` and write weights, configuration, tokenizer and chat template into `out`."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _tell(0.2, "reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    _tell(0.4, "dequantising the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # save_pretrained refuses a model that still calls itself quantised; by now its weights are plain fp32.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    _tell(0.8, "writing bf16 safetensors")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _drop_origin(out / "config.json")


def _drop_origin(path: Path) -> None:
    config = json.loads(path.read_text())
    for key in ("_name_or_path", "_model_name_or_path"):  # the trainer's own folder names, of no use to anybody
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _tell(fraction: float, step: str) -> None:
    print(f"{fraction} {step}", flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
