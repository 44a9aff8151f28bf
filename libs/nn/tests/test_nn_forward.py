"""The forward against transformers, and against itself in every other way of computing the same tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from treadle.contract.errors import InvalidArgument, ResourceExhausted
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM

Reference = Callable[[Path, list[int]], Tensor]
TOLERANCE, OF_VALUE = 1e-4, 1e-6  # of a log-probability in fp32, which has seven digits: those of unlikely tokens reach -60
TEXT = (
    "<|im_start|>user\nWhat is the capital of France, and which river runs through it? Answer in one sentence.<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris, and the river Seine runs through it.<|im_end|>\n"
    "<|im_start|>user\nAnd of Italy? Please name three sights as well; 1, 2 and 3.<|im_end|>\n<|im_start|>assistant\n"
)


def step(model: CausalLM, batch: Sequence[tuple[list[int], SequenceKV]]) -> list[Tensor]:
    """Run one step; log-probabilities [T, vocab] of each request."""
    starts = [0]
    for ids, _ in batch:
        starts.append(starts[-1] + len(ids))
    tokens = torch.tensor([token for ids, _ in batch for token in ids])
    positions = torch.cat([torch.arange(kv.length, kv.length + len(ids)) for ids, kv in batch])
    log_probs = model.logits(model.forward(tokens, positions, starts, [kv for _, kv in batch])).log_softmax(-1)
    return list(torch.split(log_probs, [len(ids) for ids, _ in batch]))


def chunked(model: CausalLM, ids: list[int], sizes: Sequence[int], kv: SequenceKV) -> Tensor:
    """Run `ids` in chunks of `sizes`, the last one again and again."""
    parts, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[min(turn, len(sizes) - 1)]
        parts += step(model, [(ids[at : at + size], kv)])
        at, turn = at + size, turn + 1
    return torch.cat(parts)


def random_ids(model: CausalLM, count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, model.config.vocab, (count,), generator=draw)]


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=OF_VALUE, atol=TOLERANCE) and bool((left.argmax(-1) == right.argmax(-1)).all())


@pytest.fixture(scope="module")
def prompt(smollm2_folder: Path) -> list[int]:
    return list(Tokenizer.from_file(str(smollm2_folder / "tokenizer.json")).encode(TEXT).ids)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_tiny_random_models_equal_transformers_whole_chunked_and_token_by_token(
    name: str, make_tiny: Callable[[str], Path], reference: Reference
) -> None:
    folder = make_tiny(name)
    model = CausalLM.load(folder)
    ids = random_ids(model, 75, seed=1)
    expected = reference(folder, ids)
    for sizes in ([75], [5, 1, 30, 2, 7], [40, 1], [1]):
        assert close(chunked(model, ids, sizes, model.new_kv()), expected), f"chunks of {sizes}"


def test_smollm2_equals_transformers_on_a_whole_prompt(
    smollm2: CausalLM, smollm2_folder: Path, prompt: list[int], reference: Reference
) -> None:
    assert close(chunked(smollm2, prompt, [len(prompt)], smollm2.new_kv()), reference(smollm2_folder, prompt))


def test_smollm2_equals_transformers_in_uneven_chunks_and_in_decode_steps(
    smollm2: CausalLM, smollm2_folder: Path, prompt: list[int], reference: Reference
) -> None:
    expected = reference(smollm2_folder, prompt)
    assert close(chunked(smollm2, prompt, [17, 1, 33, 2, 9], smollm2.new_kv()), expected)
    assert close(chunked(smollm2, prompt, [len(prompt) - 12, 1], smollm2.new_kv()), expected)


def test_smollm2_batches_of_mixed_lengths_equal_transformers(
    smollm2: CausalLM, smollm2_folder: Path, prompt: list[int], reference: Reference
) -> None:
    expected = reference(smollm2_folder, prompt)
    kvs = [smollm2.new_kv() for _ in range(4)]
    chunked(smollm2, prompt[:50], [50], kvs[0])
    chunked(smollm2, prompt[:31], [31], kvs[1])
    # one decodes, one continues a chunk, one begins, one begins with a single token
    batch = [(prompt[50:51], kvs[0]), (prompt[31:60], kvs[1]), (prompt[:44], kvs[2]), (prompt[:1], kvs[3])]
    for got, wanted in zip(step(smollm2, batch), (expected[50:51], expected[31:60], expected[:44], expected[:1]), strict=True):
        assert close(got, wanted)


def test_smollm2_answers_a_question_greedily(smollm2: CausalLM, smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    kv = smollm2.new_kv()
    ids = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    said: list[int] = []
    while len(said) < 20 and not set(said[-1:]) & set(smollm2.config.eos_token_ids):
        (log_probs,) = step(smollm2, [(said[-1:] or ids, kv)])
        said.append(int(log_probs[-1].argmax()))
    assert tokenizer.decode(said) == "The capital of France is Paris."


def test_prefix_blocks_of_another_sequence_give_the_same_numbers(smollm2: CausalLM, prompt: list[int]) -> None:
    first = smollm2.new_kv()
    expected = chunked(smollm2, prompt, [len(prompt)], first)
    blocks = [first.block(start, start + 16) for start in range(0, 64, 16)]
    first.truncate(3)  # blocks are copies: what becomes of their source does not matter
    chunked(smollm2, prompt[::-1], [len(prompt)], first)
    second = smollm2.new_kv()
    for block in blocks:
        second.extend_from(block)
    assert close(chunked(smollm2, prompt[64:], [10, 1], second), expected[64:])


def test_a_truncated_sequence_goes_on_as_if_the_rest_had_never_been(tiny: CausalLM) -> None:
    ids, wrong = random_ids(tiny, 40, seed=2), random_ids(tiny, 15, seed=3)
    kv = tiny.new_kv()
    chunked(tiny, ids[:25] + wrong, [40], kv)
    kv.truncate(25)
    assert close(chunked(tiny, ids[25:], [4], kv), chunked(tiny, ids, [40], tiny.new_kv())[25:])


def test_who_wants_keys_and_values_alone_gets_the_same_ones_and_no_hidden_states(tiny: CausalLM) -> None:
    ids, kvs = torch.tensor(random_ids(tiny, 30, seed=4)), [tiny.new_kv() for _ in range(2)]
    whole = tiny.forward(ids, torch.arange(30), [0, 30], kvs[:1])
    none = tiny.forward(ids, torch.arange(30), [0, 30], kvs[1:], kv_only=True)
    assert (whole.shape, none.shape) == ((30, tiny.config.hidden), (0, tiny.config.hidden))
    for layer in range(tiny.config.layers):
        assert torch.equal(kvs[0].keys(layer), kvs[1].keys(layer))
        assert torch.equal(kvs[0].values(layer), kvs[1].values(layer))
    assert kvs[1].length == 30


def test_positions_are_per_row_and_only_their_differences_matter(tiny: CausalLM) -> None:
    ids = torch.tensor(random_ids(tiny, 30, seed=4))
    near = tiny.forward(ids, torch.arange(30), [0, 30], [tiny.new_kv()])
    far = tiny.forward(ids, torch.arange(100, 130), [0, 30], [tiny.new_kv()])
    torn = tiny.forward(ids, torch.cat((torch.arange(15), torch.arange(60, 75))), [0, 30], [tiny.new_kv()])
    assert torch.allclose(near, far, atol=1e-4)
    assert torch.allclose(near[:15], torn[:15], atol=1e-4)
    assert not torch.allclose(near[15:], torn[15:], atol=1e-2)


def test_the_hook_runs_once_before_each_layer_in_order_and_may_change_hidden(tiny: CausalLM) -> None:
    ids = torch.tensor(random_ids(tiny, 12, seed=5))
    seen: list[int] = []

    def look(layer: int, hidden: Tensor) -> Tensor:
        seen.append(layer)
        assert hidden.shape == (12, tiny.config.hidden)
        return hidden

    def change(layer: int, hidden: Tensor) -> Tensor:
        return hidden + 0.5 if layer == 1 else hidden

    plain = tiny.forward(ids, torch.arange(12), [0, 12], [tiny.new_kv()])
    assert torch.equal(tiny.forward(ids, torch.arange(12), [0, 12], [tiny.new_kv()], look), plain)
    assert seen == list(range(tiny.config.layers))
    assert not torch.allclose(tiny.forward(ids, torch.arange(12), [0, 12], [tiny.new_kv()], change), plain, atol=1e-2)


def test_hidden_states_that_a_hook_keeps_do_not_change_later(tiny: CausalLM) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_layer: int, hidden: Tensor) -> Tensor:
        kept.append((hidden, hidden.clone()))
        return hidden

    tiny.forward(torch.arange(9), torch.arange(9), [0, 9], [tiny.new_kv()], keep)
    assert all(torch.equal(hidden, copy) for hidden, copy in kept)


def test_a_step_that_fails_half_way_leaves_its_sequences_as_they_were(tiny: CausalLM) -> None:
    ids = random_ids(tiny, 20, seed=6)
    kv = tiny.new_kv()
    chunked(tiny, ids[:10], [10], kv)

    def fail(layer: int, hidden: Tensor) -> Tensor:
        if layer == 2:
            raise RuntimeError("the rows did not come")
        return hidden

    with pytest.raises(RuntimeError, match="rows did not come"):
        tiny.forward(torch.tensor([1, 2]), torch.tensor([10, 11]), [0, 2], [kv], fail)
    assert kv.length == 10
    assert close(chunked(tiny, ids[10:], [10], kv), chunked(tiny, ids, [20], tiny.new_kv())[10:])


def test_a_request_without_rows_takes_no_part(tiny: CausalLM) -> None:
    ids = torch.tensor(random_ids(tiny, 6, seed=8))
    kvs = [tiny.new_kv() for _ in range(3)]
    got = tiny.forward(ids, torch.arange(6), [0, 0, 6, 6], kvs)
    assert [kv.length for kv in kvs] == [0, 6, 0]
    assert torch.equal(got, tiny.forward(ids, torch.arange(6), [0, 6], [tiny.new_kv()]))


def test_bf16_weights_run_and_agree_wherever_it_is_not_close(smollm2: CausalLM, smollm2_folder: Path, prompt: list[int]) -> None:
    half = CausalLM.load(smollm2_folder, torch.bfloat16)
    (rough,) = step(half, [(prompt, half.new_kv())])
    (exact,) = step(smollm2, [(prompt, smollm2.new_kv())])
    assert half.dtype == torch.bfloat16
    assert rough.dtype == torch.float32
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.25  # nats; a bf16 weight has three digits
    assert clear.sum() > len(prompt) / 2
    assert torch.equal(rough.argmax(-1)[clear], exact.argmax(-1)[clear])


@pytest.mark.parametrize(
    ("tokens", "positions", "starts", "requests", "named"),
    [
        ([1, 2], [0], [0, 2], 1, "positions"),
        ([1, 2], [0, 1], [0, 1], 1, "starts"),
        ([1, 2], [0, 1], [0, 2, 1], 2, "starts"),
        ([1, 2], [0, 1], [0, 2], 2, "kv"),
        ([1, 999], [0, 1], [0, 2], 1, "tokens"),
        ([1, -1], [0, 1], [0, 2], 1, "tokens"),
        ([1, 2], [0, 256], [0, 2], 1, "positions"),
        ([], [], [0, 0], 1, "tokens"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_name(
    tiny: CausalLM, tokens: list[int], positions: list[int], starts: list[int], requests: int, named: str
) -> None:
    ids, at = torch.tensor(tokens, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match=named):
        tiny.forward(ids, at, starts, [tiny.new_kv() for _ in range(requests)])


def test_one_sequence_cannot_stand_twice_in_a_step(tiny: CausalLM) -> None:
    kv = tiny.new_kv()
    with pytest.raises(InvalidArgument, match="different sequences"):
        tiny.forward(torch.tensor([1, 2]), torch.tensor([0, 0]), [0, 1, 2], [kv, kv])


def test_a_sequence_does_not_grow_beyond_the_models_positions(tiny: CausalLM) -> None:
    kv = tiny.new_kv()
    chunked(tiny, random_ids(tiny, 256, seed=9), [256], kv)
    with pytest.raises(ResourceExhausted, match="positions_max is 256"):
        tiny.forward(torch.tensor([1]), torch.tensor([255]), [0, 1], [kv])
    assert kv.length == 256
