"""Long prefixes: dictionaries and exact KV merged into vLLM's attention, answer for answer as in the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference_worker.adapters.prefix_kv_file import map_prefix_kv
from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_opening import PrefixOpener
from inference_worker.domain.request import MemoryReport, Request, Sampling
from treadle.client.asm import map_folder
from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionarySettings,
    KeyMode,
    Positions,
    Prefix,
    RowDtype,
    tensor_name,
)
from treadle.contract.dictionary_file import PREFIX_KV_FILE, tensor_info, write_folder
from treadle.nn.lookup_keys import join_heads, lookup_keys
from treadle.nn.model import CausalLM
from treadle.nn.model_identity import dictionary_model
from treadle.vllm import MemoryConfig
from treadle.vllm.config import Choice
from treadle.vllm.outcomes import BEGIN_ANEW, UsedPrefix

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, POSITIONS_MAX = 128, 3, 4, 2, 32, 256, 256
PREFIX_TOKENS, STEP_TOKENS, TOKENS = 45, 48, 10
DIFFERENCE_MAX = 5e-4
EACH = LAYERS * HEADS // KV_HEADS  # lookups of a token: a query of each layer and head of a group
KINDS = ("Llama", "Qwen2", "Qwen3")
OF_ONE_KIND = pytest.mark.parametrize("both", KINDS[:1], indirect=True)
Traces = Sequence[Sequence[int]]


def ids(count: int, seed: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(1, VOCAB, count)]


class Collected:
    """Takes what a dictionary is made of."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, ...]] = {}

    def take(self, layer: int, *parts: torch.Tensor) -> None:
        self.layers[layer] = tuple(part.clone() for part in parts)


@dataclass
class Both:
    """The same model in vLLM and in the embedded engine, and dictionaries for it."""

    folder: Path
    model: CausalLM
    vllm: Any
    scratch: Path

    def dictionary(
        self, name: str, prefix: Sequence[int], traces: Traces, *, layers: Sequence[int] = range(LAYERS), keep_kv: bool = True,
        **settings: Any,
    ) -> Path:  # fmt: skip
        """The folder of a dictionary with an entry for every query of the traces."""
        model, kv, states, count = self.model, self.model.new_kv(), Collected(), len(prefix)
        model.forward(torch.tensor(prefix), torch.arange(count), [0, count], [kv])
        starts = np.cumsum([0, *map(len, traces)]).tolist()
        positions = torch.cat([torch.arange(count, count + len(trace)) for trace in traces])
        tokens = torch.tensor([token for trace in traces for token in trace])
        model.forward(tokens, positions, starts, [model.new_kv() for _ in traces], shared=kv, collect=states)
        whole: dict[str, Any] = {"key": KeyMode.OWN_POSITION, "dtype": RowDtype.F32, "entries": len(tokens) * HEADS // KV_HEADS}
        chosen = DictionarySettings(**(whole | settings))
        tensors: dict[str, tuple[str, Any]] = {}
        for layer in layers:
            queries, rotated, a, log_z = states.layers[layer]
            keys = lookup_keys(queries, rotated, model.rope, chosen, model.config).transpose(0, 1).flatten(1, 2)
            values, logs = (join_heads(part, chosen, model.config).transpose(0, 1).flatten(1, 2) for part in (a, log_z))
            for part, rows in {"keys": keys, "states": values, "log_z": logs}.items():
                tensors[tensor_name(layer, part)] = ("F32", rows.contiguous().numpy())
            tensors[tensor_name(layer, "counts")] = ("I32", np.ones(keys.shape[:2], np.int32))
            spread = np.linspace(0.995, 1, QUANTILES, dtype=np.float32)
            tensors[tensor_name(layer, "cosine_quantiles")] = ("F32", np.tile(spread, (len(keys), 1)))
        folder = self.scratch / f"{name}-{len(list(self.scratch.iterdir()))}"
        folder.mkdir()
        digest = None
        if keep_kv:
            save_file({"kv": kv.block(0, count).kv.contiguous()}, folder / PREFIX_KV_FILE)
            digest = sha256((folder / PREFIX_KV_FILE).read_bytes()).hexdigest()
        infos = tuple((each, tensor_info(rows, dtype)) for each, (dtype, rows) in sorted(tensors.items()))
        made = Dictionary(
            name, dictionary_model(self.folder, model.config), tuple(layers), Prefix(digest_of(prefix), count, (count,)),
            Calibration(digest_of(tokens.tolist()), len(traces), len(tokens)), chosen, infos, digest,
        )  # fmt: skip
        write_folder(folder, made, {each: rows for each, (_, rows) in tensors.items()})
        return folder

    def opened(self, folder: Path) -> str:
        """Its NAME@VERSION, open in vLLM."""
        (answer,) = self.vllm.llm.collective_rpc("open_treadle_prefix", args=(str(folder),))
        assert "@" in answer, answer
        return str(answer)

    def closed(self, *names: str) -> None:
        for name in names:
            self.vllm.llm.collective_rpc("close_treadle_prefix", args=(name,))
        self.vllm.llm.llm_engine.step()  # in which the process of the model hears which requests are over
        self.vllm.reports()  # closes what nobody uses
        assert not self.vllm.batch.prefixes._prefixes._open

    def behind_tokens(self, prefix: Sequence[int], prompt: Sequence[int], tokens: int = TOKENS) -> Any:
        return self.embedded([*prefix, *prompt], None, tokens)[0]

    def embedded(self, prompt: Sequence[int], folder: Path | None, tokens: int = TOKENS) -> tuple[Any, MemoryReport | None]:
        """The embedded engine's answer, and its report."""
        limits = Limits(step_tokens_max=512, prefix_cache_bytes_max=0, context_tokens_max=POSITIONS_MAX)
        engine = Engine(self.model, read_vocabulary(self.folder / "tokenizer.json"), limits)
        prefix = None if folder is None else self._open_here(folder)
        answer = Answer()
        engine.submit(
            Request(tuple(prompt), Sampling(max_tokens=tokens, ignore_eos=True, top_logprobs=0)), answer, Lease(), Lease(prefix)
        )
        run_until_done(engine, [answer])
        assert answer.error is None, answer.error
        assert answer.piece.finish is not None
        reports = [each for each in answer.piece.finish.memory if each.kind == "prefix"]
        return answer.piece, reports[0] if reports else None

    def _open_here(self, folder: Path) -> OpenPrefix:
        class Store:
            def open(self, name: str, version: str, expected: Mapping[str, str]) -> Any:
                return map_folder(folder)

        opener = PrefixOpener(
            lambda: dictionary_model(self.folder, self.model.config), self.model.config.positions_max, map_prefix_kv
        )
        found = map_folder(folder)
        return opener.open(Store(), found.dictionary, found.version)  # type: ignore[arg-type]  # what the test needs of it


def digest_of(tokens: Sequence[int]) -> str:
    return sha256(np.array(tokens, dtype="<i4").tobytes()).hexdigest()


def made(folder: Path, kind: str) -> Path:
    """A random model as transformers writes it, whose tokens are bytes."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        intermediate_size=96, vocab_size=VOCAB, max_position_embeddings=POSITIONS_MAX, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 or name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    model.to(torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, engines: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Steps of 48 tokens at most, so that prompts come in chunks."""
    torch.set_num_threads(1)
    folder = made(tmp_path_factory.mktemp("models") / request.param, request.param)
    plain: dict[str, Any] = (
        {"hf_overrides": {}} if request.param == "Llama" else {}
    )  # vLLM's own class will do where there is no pool
    engine = engines(
        folder, MemoryConfig(prefixes_max=3), **plain, skip_tokenizer_init=True, max_model_len=200, max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=8 << 20,
    )  # fmt: skip
    return Both(folder, CausalLM.load(folder), engine, tmp_path_factory.mktemp("dictionaries"))


def assert_same(said: Any, piece: Any) -> None:
    assert said.tokens == list(piece.token_ids)
    worst = max(abs(one - entry.logprob) for one, entry in zip(said.logprobs, piece.logprobs, strict=True))
    assert worst <= DIFFERENCE_MAX, f"log-probabilities differ by up to {worst:.6f}"


def say(both: Both, *asked: tuple[Sequence[int], dict[str, Any]], tokens: int = TOKENS) -> list[Any]:
    """Answers of one batch, each request with its own choices."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, extra_args={"treadle": ours}
        )
        for _, ours in asked
    ]
    outputs = both.vllm.llm.generate([{"prompt_token_ids": list(prompt)} for prompt, _ in asked], params, use_tqdm=False)
    return [both.vllm._said(output) for output in outputs]


def test_a_batch_with_two_dictionaries_an_exact_kv_and_none_in_chunks_and_then_from_the_prefix_cache(both: Both) -> None:
    rules, guide, first, second = ids(PREFIX_TOKENS, 1), ids(70, 2), ids(75, 3), ids(40, 4)
    behind = [both.behind_tokens(rules, first), both.behind_tokens(guide, second), both.behind_tokens(rules, second)]
    one = both.dictionary("rules", rules, [[*first, *behind[0].token_ids]])
    other = both.dictionary("guide", guide, [[*second, *behind[1].token_ids]])
    names = both.opened(one), both.opened(other)
    expected = [*behind, both.embedded(first, None)[0]]
    for cached in ([0, 0, 0, 0], [64, 32, 32, 64]):
        said = say(both, (first, {"prefix": names[0]}), (second, {"prefix": names[1]}),
                   (second, {"prefix": names[0], "prefix_exact": True}), (first, {}))  # fmt: skip
        assert [answer.cached for answer in said] == cached
        for answer, piece in zip(said, expected, strict=True):
            assert_same(answer, piece)
            assert not answer.degraded
        assert said[3].outcome is None
        used = [answer.outcome.prefix for answer in said[:3]]
        assert used[0] == UsedPrefix("rules", names[0].partition("@")[2], PREFIX_TOKENS, False, (75 + TOKENS - 1) * EACH, 0, False)
        assert (used[1].lookups, used[1].lookups_outside, used[1].tokens) == ((40 + TOKENS - 1) * EACH, 0, 70)
        assert (used[2].lookups, used[2].exact, used[2].off_task) == (0, True, False)
    assert said[0].tokens != said[3].tokens
    both.closed(*names)


@pytest.mark.parametrize("key", [KeyMode.PRE_ROPE, KeyMode.ROPE_UNIFIED])
def test_queries_turned_back_find_what_the_embedded_engine_finds(both: Both, key: KeyMode) -> None:
    prefix, trace = ids(PREFIX_TOKENS, 1), ids(90, 5)
    prompt = [*trace[20:60], *ids(20, 6)]  # part of it as calibrated, elsewhere; part of it not
    folder = both.dictionary(
        "rules", prefix, [trace, ids(60, 7)], keep_kv=False, key=key, key_position=0 if key is KeyMode.PRE_ROPE else 9
    )
    name = both.opened(folder)
    (said,) = say(both, (prompt, {"prefix": name}))
    piece, report = both.embedded(prompt, folder)
    assert_same(said, piece)
    assert report is not None
    assert (said.outcome.prefix.lookups, said.outcome.prefix.lookups_outside) == (report.lookups, report.lookups_outside)
    assert 0 < report.lookups_outside < report.lookups
    assert said.degraded == piece.degraded
    both.closed(name)


@OF_ONE_KIND
def test_layers_without_a_dictionary_and_positions_from_zero(both: Both) -> None:
    prefix, prompt = ids(PREFIX_TOKENS, 1), ids(60, 8)
    for place, settings in enumerate(({"layers": (1,)}, {"positions": Positions.FROM_ZERO})):
        folder = both.dictionary("rules", prefix, [prompt], keep_kv=False, **settings)  # type: ignore[arg-type]  # what the test needs of it
        name = both.opened(folder)
        (said,) = say(both, (prompt, {"prefix": name}))
        piece, report = both.embedded(prompt, folder)
        assert_same(said, piece)
        assert report is not None
        assert said.outcome.prefix.lookups == report.lookups == (60 + TOKENS - 1) * EACH // (LAYERS if place == 0 else 1)
        both.closed(name)


@OF_ONE_KIND
def test_the_guard_judges_a_prompt_as_the_embedded_engine_does_cached_or_not(both: Both) -> None:
    prefix, trace, prompt = ids(PREFIX_TOKENS, 1), ids(60, 9), ids(70, 10)
    kept, bare = both.dictionary("rules", prefix, [trace]), both.dictionary("bare", prefix, [trace], keep_kv=False)
    names = both.opened(kept), both.opened(bare)
    piece, report = both.embedded(prompt, bare)
    assert report is not None
    assert piece.degraded
    for _ in range(2):
        anew, asked, failing, masked = say(
            both, (prompt, {"prefix": names[0], "begins_anew": True}), (prompt, {"prefix": names[0], "prefix_exact": True}),
            (prompt, {"prefix": names[1], "late": "fail"}), (prompt, {"prefix": names[1], "begins_anew": True}),
        )  # fmt: skip
        assert (anew.finish, anew.tokens, anew.outcome.error.kind) == ("error", [], BEGIN_ANEW)
        assert anew.outcome.prefix.lookups == 70 * EACH
        assert anew.outcome.prefix.lookups_outside > 0.9 * anew.outcome.prefix.lookups
        assert_same(asked, both.behind_tokens(prefix, prompt))
        assert (failing.finish, failing.outcome.error.kind, failing.outcome.degraded) == ("error", "Unavailable", True)
        assert "no exact KV is kept" in failing.outcome.error.message
        assert (masked.cached, masked.degraded, masked.outcome.prefix.off_task) == (64, True, True)  # from the one before it
        assert masked.outcome.prefix.lookups_outside == report.lookups_outside
        assert_same(masked, piece)
    both.closed(*names)


@OF_ONE_KIND
def test_a_request_keeps_its_version_while_another_one_takes_the_name(both: Both) -> None:
    from vllm import SamplingParams

    prefix, prompt = ids(PREFIX_TOKENS, 1), ids(40, 11)
    piece = both.behind_tokens(prefix, prompt)
    trace = [*prompt, *piece.token_ids]
    old, new = (
        both.opened(both.dictionary("rules", prefix, [trace])),
        both.opened(both.dictionary("rules", prefix, [trace, ids(9, 1)])),
    )
    assert old != new
    engine, said = both.vllm.llm.llm_engine, dict[str, Any]()
    params = {name: SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False,
                                   extra_args={"treadle": {"prefix": name}}) for name in (old, new)}  # fmt: skip
    engine.add_request("one", {"prompt_token_ids": prompt}, params[old])
    for _ in range(3):
        engine.step()
    both.vllm.llm.collective_rpc("close_treadle_prefix", args=(old,))
    engine.add_request("two", {"prompt_token_ids": prompt}, params[new])
    while engine.has_unfinished_requests():
        said |= {output.request_id: both.vllm._said(output) for output in engine.step() if output.finished}
    for name, version in (("one", old), ("two", new)):
        assert_same(said[name], piece)
        assert f"rules@{said[name].outcome.prefix.version}" == version
        assert said[name].cached == 0
    (late,) = say(both, (prompt, {"prefix": old}))
    assert (late.finish, late.outcome.error.kind) == ("error", "NotFound")
    both.closed(new)


@OF_ONE_KIND
def test_a_lookup_that_fails_fails_the_requests_of_its_dictionary_alone(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, prompt = ids(PREFIX_TOKENS, 1), ids(60, 13)
    piece = both.behind_tokens(prefix, prompt)
    trace = [*prompt, *piece.token_ids]
    sound, broken = both.opened(both.dictionary("rules", prefix, [trace])), both.opened(both.dictionary("guide", prefix, [trace]))
    memory = both.vllm.batch.prefixes._prefixes._open[Choice.parse(broken, "")].memory
    lookup = memory.lookup

    def fails(layer: int, *queries: Any) -> Any:
        if layer == 1:
            raise ValueError("keys: must be aligned")
        return lookup(layer, *queries)

    monkeypatch.setattr(memory, "lookup", fails)
    asked = [(prompt, {"prefix": sound}), (prompt, {"prefix": broken}), (prompt, {}), (prompt, {"prefix": broken})]
    said = say(both, *asked)
    assert_same(said[0], piece)
    assert_same(said[2], both.embedded(prompt, None)[0])
    assert [(said[at].finish, said[at].outcome.error.kind) for at in (1, 3)] == [("error", "Unavailable")] * 2
    monkeypatch.undo()
    (healed,) = say(both, (prompt, {"prefix": broken}))
    assert healed.cached == 0  # nothing that it computed then is kept
    assert_same(healed, piece)
    both.closed(sound, broken)


@OF_ONE_KIND
def test_a_dictionary_of_another_model_is_refused_with_the_field(both: Both, tmp_path: Path) -> None:
    prompt = ids(20, 1)
    opened = map_folder(both.dictionary("rules", prompt, [prompt], keep_kv=False))
    for field, other in (("rope", "0" * 64), ("layers", LAYERS + 1), ("digest", "0" * 64)):
        made_for = replace(opened.dictionary.model, **{field: other})  # type: ignore[arg-type]  # what the test needs of it
        folder = tmp_path / field
        folder.mkdir()
        write_folder(folder, replace(opened.dictionary, model=made_for), dict(opened.tensors))
        (answer,) = both.vllm.llm.collective_rpc("open_treadle_prefix", args=(str(folder),))
        assert answer.startswith("FingerprintMismatch: ")
        assert f"model.{field}" in answer
    opened.close()
    both.closed()


@OF_ONE_KIND
def test_a_dictionary_that_nothing_can_be_computed_with_is_refused_with_the_tensor(both: Both, tmp_path: Path) -> None:
    prompt, name = ids(20, 1), tensor_name(1, "states")
    opened = map_folder(both.dictionary("rules", prompt, [prompt], keep_kv=False))
    tensors = {each: np.array(tensor) for each, tensor in opened.tensors.items()}
    tensors[name].reshape(-1)[5] = np.nan
    infos = tuple((each, tensor_info(tensors[each], info.dtype)) for each, info in opened.dictionary.tensors)
    write_folder(tmp_path, replace(opened.dictionary, tensors=infos), tensors)
    opened.close()
    (answer,) = both.vllm.llm.collective_rpc("open_treadle_prefix", args=(str(tmp_path),))
    assert answer == f"DataLoss: tensor {name}: NaN or infinity"
    both.closed()


@OF_ONE_KIND
def test_no_more_are_held_than_the_limit_and_one_let_go_makes_room(both: Both) -> None:
    prompt = ids(20, 1)
    folders = [both.dictionary(name, prompt, [prompt], keep_kv=False) for name in ("one", "two", "three", "four")]
    names = [both.opened(folder) for folder in folders[:3]]
    assert both.opened(folders[0]) == names[0]  # again: held twice
    (answer,) = both.vllm.llm.collective_rpc("open_treadle_prefix", args=(str(folders[3]),))
    assert answer == "ResourceExhausted: 3 prefixes are open, the limit is treadle.prefixes_max; let go of one"
    both.vllm.llm.collective_rpc("close_treadle_prefix", args=(names[1],))
    names[1] = both.opened(folders[3])
    both.closed(names[0], *names)


@pytest.mark.slow
@OF_ONE_KIND
def test_a_compiled_model_merges_too(both: Both, engines: Callable[..., Any]) -> None:
    rules, prompt = ids(PREFIX_TOKENS, 1), ids(60, 14)
    folder = both.dictionary("rules", rules, [[*prompt, *both.behind_tokens(rules, prompt).token_ids]])
    compiled = engines(
        both.folder, MemoryConfig(), skip_tokenizer_init=True, enforce_eager=False, max_model_len=200, max_num_batched_tokens=48,
        kv_cache_memory_bytes=8 << 20,
    )  # fmt: skip
    graph = replace(both, vllm=compiled)
    name = graph.opened(folder)
    asked: list[tuple[list[int], dict[str, Any]]] = [
        (prompt, {"prefix": name}), (prompt, {"prefix": name, "prefix_exact": True}), (prompt, {}),
    ]  # fmt: skip
    expected = [*[both.behind_tokens(rules, prompt)] * 2, both.embedded(prompt, None)[0]]
    for said, piece in zip(say(graph, *asked), expected, strict=True):
        assert_same(said, piece)
    graph.closed(name)


@OF_ONE_KIND
def test_what_cannot_be_is_refused_and_nobody_elses_request_notices(both: Both) -> None:
    prefix, prompt = ids(60, 1), ids(40, 12)
    name = both.opened(both.dictionary("rules", prefix, [prompt], keep_kv=False))
    missing = f"rules@{'0' * 64}"
    plain, *refused = say(
        both, (prompt, {}), (prompt, {"prefix": missing}), (prompt, {"prefix": "rules"}), (prompt, {"prefix": name, "prefix_exact": True}),
        (ids(192, 1), {"prefix": name}), tokens=5,
    )  # fmt: skip
    assert_same(plain, both.embedded(prompt, None, 5)[0])
    errors = [each.outcome.error for each in refused]
    assert [each.kind for each in errors] == ["NotFound", "InvalidArgument", "NotFound", "InvalidArgument"]
    for error, said in zip(
        errors, ("is not open", "NAME@VERSION", "no exact KV", "up to 197: more than the model's 256"), strict=True
    ):
        assert said in error.message
    both.closed(name)
