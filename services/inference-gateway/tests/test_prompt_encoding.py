"""Chat templates and tokenizers of model folders."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from inference_gateway.adapters.chat_template import ChatTemplate
from inference_gateway.adapters.prompt_encoder import FolderEncoder, open_folder
from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import ChatPrompt, Message
from treadle.contract.errors import FingerprintMismatch, InvalidArgument, NotFound

CHAT = (Message("system", "Be brief."), Message("user", "Größe?\n{{ 1 }}"), Message("assistant", ""), Message("user", "<b>&</b>"))
ROOM = 10_000
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n{{ bos_token }}[INST] {{ m.content | trim }} [/INST]\n"
    "    {% else %}\n {{ m.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}|{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "tojson": "{{ messages[1] | tojson }}{{ messages[3].content | tojson(indent=2) }}",
    "tools": "{% if tools is not none %}{{ tools | length }}{% else %}none{% endif %}{{ documents is none }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


def encoder_with(model_dir: Path, folder: Path, **config: object) -> FolderEncoder:
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return open_folder(folder, digest_of(folder))


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_templates_are_rendered_as_transformers_renders_them(name: str) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    turns = [{"role": message.role, "content": message.content} for message in CHAT]
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = chat_template_utils.render_jinja_template(
        [turns], chat_template=TEMPLATES[name], add_generation_prompt=True, **specials
    )
    assert ChatTemplate(TEMPLATES[name], specials).render(ChatPrompt(CHAT)) == expected[0]


def test_a_template_may_tell_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(ChatPrompt(CHAT)) == str(datetime.now().year)


def test_a_template_that_refuses_the_messages_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestRefused, match="roles must alternate") as refused:
        template.render(ChatPrompt(CHAT))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].content + 1 }}", "{{ 1 / messages | length - 4 }}"],
)
def test_a_template_that_breaks_the_sandbox_or_stumbles_refuses_the_messages(source: str) -> None:
    if "/" in source:
        assert ChatTemplate(source, {}).render(ChatPrompt(CHAT))
        return
    rendered = ""
    try:
        rendered = ChatTemplate(source, {}).render(ChatPrompt(CHAT))
    except RequestRefused:
        return
    assert rendered == ""  # an unsafe attribute is undefined, and undefined renders as nothing


def test_a_template_that_is_none_is_refused_when_it_is_read() -> None:
    with pytest.raises(InvalidArgument, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_special_tokens_in_a_chat_become_their_ids(model_dir: Path) -> None:
    encoder = open_folder(model_dir, digest_of(model_dir))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    token_ids = encoder.encode_chat(ChatPrompt((Message("user", "hi"),)), ROOM)
    assert token_ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert tokenizer.decode(token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_a_template_may_stand_in_the_configuration_alone_or_among_named_ones(model_dir: Path, tmp_path: Path) -> None:
    plain = encoder_with(model_dir, tmp_path / "plain", chat_template="{{ messages[0].content }}")
    assert len(plain.encode_chat(ChatPrompt((Message("user", "abc"),)), ROOM)) == 3
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}]
    among = encoder_with(model_dir, tmp_path / "named", chat_template=named, bos_token={"content": "<|im_start|>"})
    assert len(among.encode_chat(ChatPrompt((Message("user", "abc"),)), ROOM)) == 4


def test_a_model_without_a_template_takes_no_chats(model_dir: Path, tmp_path: Path) -> None:
    encoder = encoder_with(model_dir, tmp_path / "base")
    with pytest.raises(RequestRefused, match="/v1/completions"):
        encoder.encode_chat(ChatPrompt(CHAT), ROOM)
    assert len(encoder.encode_text("abc", ROOM)) == 3


def test_a_text_gets_the_special_tokens_of_its_tokenizer_and_a_chat_does_not(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with-bos"
    shutil.copytree(model_dir, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = open_folder(folder, digest_of(folder))
    assert encoder.encode_text("abcdefgh", ROOM)[0] == bos
    assert len(encoder.encode_text("abcdefgh", ROOM)) == 9  # neither cut nor padded
    assert encoder.encode_chat(ChatPrompt((Message("user", "x"),)), ROOM).count(bos) == 2  # as the template wrote them


def test_a_folder_that_does_not_fit_is_refused_by_what_is_wrong(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatch, match="tokenizer_digest"):
        open_folder(model_dir, "0" * 64)
    with pytest.raises(NotFound, match="tokenizer_dir"):
        open_folder(tmp_path, "0" * 64)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="is not a tokenizer"):
        open_folder(tmp_path, digest_of(tmp_path))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model_dir: Path) -> None:
    encoder = open_folder(model_dir, digest_of(model_dir))
    longest = len("<|im_start|>")
    assert len(encoder.encode_text("a" * 10 * longest, 10)) == 10 * longest  # might have fitted: the count decides later
    with pytest.raises(RequestRefused, match="maximum context length is 10 tokens") as refused:
        encoder.encode_text("a" * (10 * longest + 1), 10)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestRefused, match="maximum context length is 10 tokens") as refused:
        encoder.encode_chat(ChatPrompt((Message("user", "ß" * 5 * longest),)), 10)
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")


def test_other_threads_run_while_a_long_text_is_tokenized(model_dir: Path) -> None:
    encoder, looks, done = open_folder(model_dir, digest_of(model_dir)), list[float](), threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            looks.append(time.process_time())  # which stands still while this process does

    thread = threading.Thread(target=look)
    thread.start()
    begun = time.process_time()
    encoder.encode_text("a word " * 100_000, 1 << 20)
    ended = time.process_time()
    done.set()
    thread.join(10)
    seen = [begun, *(at for at in looks if begun < at < ended), ended]
    assert max(after - before for before, after in itertools.pairwise(seen)) < max(0.5 * (ended - begun), 0.05)


def test_calls_that_are_too_deep_for_the_template_are_refused() -> None:
    arguments: dict[str, object] = {}
    for _ in range(5000):
        arguments = {"a": arguments}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    template = ChatTemplate("{{ (messages[0].tool_calls | tojson) if not tools }}", {})
    with pytest.raises(RequestRefused, match="recursion"):
        template.render(ChatPrompt((Message("assistant", "", None, (call,)),)))
