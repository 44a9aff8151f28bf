import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle_bench.asm.tasks import INTENTS, Sizes, Split, Task, load_task

SIZES = Sizes(examples=40, traces=40, questions=30)
INTENT_NAMES = [f"intent{number:02d}" for number in range(25)]


@pytest.fixture
def tokenizer() -> Tokenizer:
    words = [
        "Query",
        ":",
        "Intent",
        "how",
        *INTENT_NAMES,
        *(f"text{number}" for number in range(400)),
        *(f"{n:02d}" for n in range(77)),
    ]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *words])}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    clinc, banking = tmp_path / "clinc150", tmp_path / "banking77"
    clinc.mkdir()
    banking.mkdir()
    numbers = iter(range(100_000))
    for part, count in (("train", 5), ("val", 2), ("test_open", 2)):
        rows = [[f"how text{next(numbers) % 400} {part} {at}", name] for name in INTENT_NAMES for at in range(count)]
        (clinc / f"{part}.json").write_text(json.dumps(rows))
    for name in ("oos_val", "oos_test_open"):
        (clinc / f"{name}.json").write_text(json.dumps([["how text1", "oos"]]))
    (banking / "categories.json").write_text(json.dumps([f"kind_{number}" for number in range(77)]))
    for part, count in (("train", 6), ("test_open", 1)):
        lines = [f"how {part} {at} of {number},kind_{number}" for number in range(77) for at in range(count)]
        (banking / f"{part}.csv").write_text("\n".join(["text,category", *lines]))
    return tmp_path


def texts(task: Task, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(list(piece)) for piece in task.pieces]


def test_a_prefix_and_its_traces_share_no_example_and_the_questions_are_of_another_part(data: Path, tokenizer: Tokenizer) -> None:
    task = load_task("clinc20", 0, data, tokenizer, sizes=SIZES)
    assert len(task.pieces) == len(task.traces) == 40
    assert len(task.labels) == INTENTS
    assert not set(task.pieces) & set(task.traces)
    assert len(task.questions) == len(task.answers) == 30
    assert not any(question == piece[: len(question)] for question in task.questions for piece in task.pieces)


def test_another_seed_shows_other_examples_and_asks_the_same_questions(data: Path, tokenizer: Tokenizer) -> None:
    first, second = (load_task("clinc20", seed, data, tokenizer, sizes=SIZES) for seed in (0, 1))
    assert first.pieces != second.pieces
    assert first.questions == second.questions
    assert first == load_task("clinc20", 0, data, tokenizer, sizes=SIZES)


def test_each_class_is_shown_as_often_as_the_next(data: Path, tokenizer: Tokenizer) -> None:
    task = load_task("clinc20", 0, data, tokenizer, sizes=SIZES)
    shown = [text.split()[-1] for text in texts(task, tokenizer)]
    assert {shown.count(name) for name in INTENT_NAMES[:INTENTS]} == {2}


def test_permuted_labels_never_name_their_own_class(data: Path, tokenizer: Tokenizer) -> None:
    plain, permuted = (load_task(name, 0, data, tokenizer, sizes=SIZES) for name in ("clinc20", "clinc20-permuted"))
    meaning = [tokenizer.decode(list(label)).strip() for label in permuted.labels]
    assert sorted(meaning) == sorted(INTENT_NAMES[:INTENTS])
    assert all(word != name for word, name in zip(meaning, INTENT_NAMES[:INTENTS], strict=True))
    assert plain.answers != ()
    assert len(permuted.answers) == len(plain.answers)


def test_validation_questions_are_not_test_questions(data: Path, tokenizer: Tokenizer) -> None:
    for name in ("clinc20", "banking77"):
        val, test = (load_task(name, 0, data, tokenizer, split=split, sizes=Sizes(20, 20, 30)) for split in (Split.VAL, Split.TEST))
        assert val.prefix == test.prefix
        assert val.questions != test.questions


def test_a_truncated_prefix_holds_whole_examples_from_the_start_on(data: Path, tokenizer: Tokenizer) -> None:
    task = load_task("clinc20", 0, data, tokenizer, sizes=SIZES)
    first, second = task.pieces[:2]
    assert task.truncated(len(first) + len(second)) == first + second
    assert task.truncated(len(first) + len(second) - 1) == first
    assert task.truncated(len(first) - 1) == ()
    assert task.truncated(len(task.prefix)) == task.prefix


def test_an_unknown_task_a_missing_folder_and_a_torn_file_are_told_apart(data: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="clinc20"):
        load_task("trec", 0, data, tokenizer)
    with pytest.raises(NotFound, match="--data"):
        load_task("nba", 0, data, tokenizer)
    (data / "clinc150" / "train.json").write_text("[[")
    with pytest.raises(DataLoss, match=r"train\.json"):
        load_task("clinc20", 0, data, tokenizer, sizes=SIZES)


def test_more_examples_than_there_are_is_refused(data: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="examples asked for"):
        load_task("clinc20", 0, data, tokenizer, sizes=Sizes(1000, 10, 10))
