"""`treadle pool` against a real pool: what it prints, its JSON, its refusals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from engram_pool.commands import app
from engram_pool.commands.load_turn import in_turn
from engram_pool.settings import Settings
from engram_pool.terminal import size_text
from treadle.chassis.settings import WrongSetting
from treadle.contract import (
    DataLoss,
    EngramModel,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
)
from treadle.contract.families import qwen_ple_model
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from tests.conftest import Grow, Process, StartPool, V41Checkpoint

Run = Callable[..., Any]


@pytest.fixture
def process(start_pool: StartPool, tmp_path: Path) -> Iterator[Process]:
    with start_pool(tmp_path / "s") as process:
        yield process


@pytest.fixture
def run(process: Process) -> Run:
    """`run("ls", "--json")`; an error that the command raises is raised here."""

    def invoke(*words: str | Path) -> Any:
        result = CliRunner().invoke(app, [*map(str, words), "--pool", process.address])
        if isinstance(result.exception, TreadleError):
            raise result.exception
        return result

    return invoke


def document(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def manifest(ple: EngramModel, tmp_path: Path) -> Path:
    path = tmp_path / "ple.json"
    path.write_bytes(ple.to_json())
    return path


def test_random_rows_are_loaded_listed_verified_and_removed(run: Run, manifest: Path) -> None:
    loaded = document(run("load", "--random", "--manifest", manifest, "--seed", "3", "--json"))
    assert (loaded["model"], loaded["current"], loaded["bytes_per_second"] > 0) == ("ple", True, True)
    (listed,) = document(run("ls", "--json"))
    assert listed["version"] == loaded["version"]
    assert listed["warm_state"] in ("cold", "warming", "warm")
    text = run("ls").stdout
    assert loaded["version"][:12] in text
    assert "4.5 MB" in text
    verified = document(run("verify", "ple", "--json"))
    assert (verified["version"], verified["intact"]) == (loaded["version"], True)
    assert verified["bytes"] == sum(loaded["rows"].values()) * 320
    removed = document(run("rm", "ple", loaded["version"][:6], "--json"))
    assert (removed["removed"], removed["awaiting_readers"]) == ([loaded["version"]], 0)
    assert document(run("ls", "--json")) == []
    assert "the pool holds no tables" in run("ls").stdout


def test_people_read_what_a_load_made(run: Run, manifest: Path) -> None:
    result = run("load", "other-name", "--random", "--manifest", manifest)
    assert result.stdout.startswith("other-name ")
    assert ": 4.5 MB in " in result.stdout
    assert "intact" in run("verify", "other-name").stdout
    assert "removed" in run("rm", "other-name").stdout


def test_load_and_list_say_what_a_memory_takes_in_the_pool(run: Run, grow: Grow, process: Process) -> None:
    loaded = document(run("load", "--grown", grow(fusion_bytes=2_000_000).path, "--json"))
    taken = process.fabric.engram.status().table_bytes
    folder = process.fabric.engram.status().segment_dir / "kjv" / loaded["version"]
    files = [*folder.glob("*.safetensors"), folder / "card.json"]
    assert loaded["segment_bytes"] == taken == sum(path.stat().st_size for path in files)
    size = size_text(taken)
    assert f": {size} in " in run("load", "--grown", grow(fusion_bytes=2_000_000).path).stdout
    assert size in run("ls").stdout


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_long_name_folds_and_nothing_beside_it_is_cut(
    run: Run, manifest: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    long = "q" * 128  # a letter that stands nowhere else
    versions = [document(run("load", name, "--random", "--manifest", manifest, "--json"))["version"] for name in (long, "ple")]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal of that width
    text = re.sub(r"\x1b\[[0-9;]*m", "", run("ls").stdout)
    assert all(version[:12] in text for version in versions)
    assert ("4.5 MB" in text, "…" in text) == (True, False)
    assert text.count("q") == 128


def test_a_load_waits_for_its_turn_and_says_so(
    run: Run, ple: EngramModel, manifest: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = qwen_ple_model("big", prime_base=200_000, row=ple.row)
    with grpc.insecure_channel(process.address) as channel:
        first = pb_grpc.EngramPoolServiceStub(channel).LoadTable(
            pb.LoadTableRequest(manifest_json=big.to_json(), random=pb.RandomSource())
        )
        next(first)
        waits: list[float] = []

        def wait(seconds: float) -> None:
            first.cancel()
            waits.append(seconds)

        monkeypatch.setattr("engram_pool.commands.loading.in_turn", partial(in_turn, wait=wait))
        result = run("load", "--random", "--manifest", manifest, "--json")
    assert json.loads(result.stdout)["model"] == "ple"
    assert set(waits) == {5.0}
    assert result.stderr == "another load is in progress; try again in 5 s (this command does so itself, for up to 600 s)\n"


def test_a_turn_is_waited_for_within_bounds_and_room_is_not() -> None:
    clock, asked = [0.0], [0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    def load(refusal: ResourceExhausted) -> None:
        asked[0] += 1
        raise refusal

    for retry_after_seconds, calls in ((5.0, 5), (None, 1)):
        clock[0], asked[0] = 0.0, 0
        with pytest.raises(ResourceExhausted):
            in_turn(
                partial(load, ResourceExhausted("full", retry_after_seconds)),
                seconds_max=20,
                now_seconds=lambda: clock[0],
                wait=wait,
            )
        assert (asked[0], clock[0]) == (calls, 5.0 * (calls - 1))


def test_a_checkpoint_is_loaded_with_its_token_map(
    run: Run, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32], tmp_path: Path
) -> None:
    ids = tmp_path / "token_map.i32"
    ids.write_bytes(token_map.tobytes())
    words: list[str | Path] = ["load", "--checkpoint", v41_checkpoint.folder, "--token-map", ids, "--json"]
    assert document(run(*words))["model"] == "deepseek-v4.1-small"
    assert document(run(*words, "mine"))["model"] == "mine"
    assert document(run("ls", "--json"))[1]["row_bytes"] == 264


def test_tensors_are_named_by_role(run: Run, ple: EngramModel, manifest: Path, tmp_path: Path, write_tensors: Any) -> None:
    rows = ple.rows_hashed(0)
    write_tensors(tmp_path / "x.safetensors", {"somewhere": ("BF16", (rows, 160), bytes(rows * 320))})
    words: list[str | Path] = ["load", "--checkpoint", tmp_path / "x.safetensors", "--manifest", manifest]
    with pytest.raises(InvalidArgument, match=r"somewhere BF16\["):
        run(*words)
    with pytest.raises(InvalidArgument, match="ROLE=TENSOR"):
        run(*words, "--map", "somewhere")
    assert document(run(*words, "--map", "0.rows=somewhere", "--json"))["rows"] == {"0": rows}


def test_the_demo_profile_takes_a_tokenizer(run: Run, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "a", "A", "b", " b"])}
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")).save(str(path))
    loaded = document(run("load", "smollm2-demo", "--random", "--profile", "smollm2-demo", "--tokenizer", path, "--json"))
    assert (loaded["model"], loaded["layers"], loaded["row_bytes"]) == ("smollm2-demo", [2, 15], 320)


def test_a_token_map_that_does_not_fit_is_refused(
    run: Run, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32], tmp_path: Path
) -> None:
    ids = tmp_path / "token_map.i32"
    ids.write_bytes(token_map[:300].tobytes())
    for name in ((), ("mine",)):
        with pytest.raises(FingerprintMismatch) as raised:
            run("load", *name, "--checkpoint", v41_checkpoint.folder, "--token-map", ids)
        assert raised.value.field == "compressed_vocab_size"


def test_a_checkpoint_brings_its_own_tokenizer_or_the_refusal_says_what_to_give(
    run: Run, v41: EngramModel, v41_checkpoint: V41Checkpoint, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    manifest = tmp_path / "v41.json"
    manifest.write_bytes(v41.to_json())
    for words in (("--checkpoint", v41_checkpoint.folder), ("--random", "--manifest", manifest)):
        with pytest.raises(InvalidArgument, match="give --tokenizer FILE or --token-map FILE"):
            run("load", *words)
    vocabulary = {f"w{number}": number for number in range(400)} | {"[UNK]": 400}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.save(str(v41_checkpoint.folder / "tokenizer.json"))
    with pytest.raises(FingerprintMismatch) as raised:  # it was taken: 401 ids are not the 400 of the checkpoint
        run("load", "--checkpoint", v41_checkpoint.folder)
    assert raised.value.field == "compressed_vocab_size"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("load",), "one of --grown FOLDER, --checkpoint PATH, --peer HOST:PORT and --random"),
        (("load", "--random", "--checkpoint", "x"), "one of --grown FOLDER, --checkpoint PATH, --peer HOST:PORT and --random"),
        (("load", "--random"), "need --manifest"),
        (("load", "--random", "--map", "a=b"), "tensors of a checkpoint"),
        (("load", "--random", "--profile", "smollm2-demo"), "needs --tokenizer"),
        (("load", "--grown", "x", "--random"), "one of --grown"),
        (("load", "--grown", "x", "--tokenizer", "y"), "brings its own"),
        (("load", "--grown", "x", "--map", "0.rows=y"), "grown and random rows have none"),
        (("promote", "x", ""), "rollback x"),
        (("load", "--random", "--profile", "x", "--manifest", "y"), "not both"),
        (("load", "--random", "--manifest", "x", "--tokenizer", "y", "--token-map", "z"), "not both"),
    ],
)
def test_words_that_do_not_go_together_are_refused(run: Run, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        run(*words)


def test_what_is_not_there_is_not_found(run: Run, manifest: Path) -> None:
    for words, says in (
        (("verify", "nobody"), "no model 'nobody'"), (("rm", "nobody"), "nobody"), (("rm", "nobody", "12"), "no model 'nobody'"),
        (("load", "--random", "--manifest", "/nowhere.json"), "/nowhere.json cannot be read"),
        (("load", "--random", "--profile", "x"), "no profile 'x'"),
        (("load", "--checkpoint", "/nowhere", "--manifest", manifest), "no file or folder /nowhere"),
    ):  # fmt: skip
        with pytest.raises(NotFound, match=says):
            run(*words)


def test_digits_that_two_versions_share_are_refused(run: Run, manifest: Path) -> None:
    for seed in range(2):
        run("load", "--random", "--manifest", manifest, "--seed", str(seed), "--keep-previous")
    first, second = (model["version"] for model in document(run("ls", "--json")))
    assert document(run("verify", "ple", "--json"))["version"] == first
    assert document(run("verify", "ple", second[:8], "--json"))["version"] == second
    shared = next((second[:n] for n in range(1, 8) if first.startswith(second[:n])), None)
    with pytest.raises(NotFound if shared is None else InvalidArgument):
        run("verify", "ple", shared or "zz")
    assert document(run("rm", "ple", "--json"))["removed"] == [first, second]


def test_a_corrupt_version_fails_the_command(run: Run, manifest: Path, process: Process) -> None:
    version = document(run("load", "--random", "--manifest", manifest, "--json"))["version"]
    segment = process.fabric.engram.status().segment_dir / "ple" / version / "layer-0.safetensors"
    with segment.open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"\xff" * 64)
    with pytest.raises(DataLoss):
        run("verify", "ple")


def test_status_tells_where_and_how_much(run: Run, process: Process) -> None:
    figures = document(run("status", "--json"))
    assert (figures["pid"], figures["table_bytes"], figures["draining"]) == (process.child.pid, 0, False)
    assert "segment dir" in run("status").stdout


def test_a_pool_with_a_key_wants_to_see_it(start_pool: StartPool, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret\n")
    with start_pool(tmp_path / "keyed", "--api-key-file", str(keys)) as process:
        refused = CliRunner().invoke(app, ["ls", "--pool", process.address])
        assert type(refused.exception).__name__ == "AccessDenied"
        assert CliRunner().invoke(app, ["ls", "--pool", process.address, "--api-key-file", str(keys)]).exit_code == 0


def test_a_grown_memory_is_loaded_promoted_and_rolled_back(run: Run, grow: Grow) -> None:
    old, new = grow(1), grow(2)
    loaded = document(run("load", "--grown", old.path, "--json"))
    assert (loaded["model"], loaded["version"], loaded["row_bytes"]) == ("kjv", old.model.version, 18)
    run("load", "--grown", new.path)
    assert [model["current"] for model in document(run("ls", "--json"))] == [True, False]
    back = document(run("rollback", "kjv", "--json"))
    assert (back["version"], back["current"], back["previous_version"]) == (old.model.version, True, new.model.version)
    forward = run("promote", "kjv", new.model.version[:9])
    assert f"{new.model.version[:12]} is current now; {old.model.version[:12]} was before" in forward.stdout
    assert "is current already" in run("promote", "kjv", new.model.version).stdout
    assert document(run("promote", "kjv", old.model.version, "--json"))["previous_version"] == new.model.version
    with pytest.raises(NotFound, match="no version 'abcdef'"):
        run("promote", "kjv", "abcdef")
    with pytest.raises(NotFound, match="no model 'bible'"):
        run("rollback", "bible")


def test_a_grown_memory_takes_another_name_and_replaces_where_that_is_asked(run: Run, grow: Grow) -> None:
    assert document(run("load", "bible", "--grown", grow(1).path, "--json"))["model"] == "bible"
    run("load", "bible", "--grown", grow(2).path, "--no-keep-previous")
    spoilt = grow(3).path
    (spoilt / "card.json").unlink()
    with pytest.raises(NotFound, match=r"card\.json is missing"):
        run("load", "--grown", spoilt)
    assert {model["model"] for model in document(run("ls", "--json"))} == {"bible"}


def test_a_pool_loads_from_another_and_an_owner_its_part(
    run: Run, manifest: Path, process: Process, start_pool: StartPool, tmp_path: Path
) -> None:
    loaded = document(run("load", "--random", "--manifest", manifest, "--seed", "3", "--json"))
    with start_pool(tmp_path / "other") as other:

        def on_other(*words: str) -> Any:
            result = CliRunner().invoke(app, [*words, "--pool", other.address])
            if isinstance(result.exception, TreadleError):
                raise result.exception
            return result

        copied = document(on_other("load", "ple", "--peer", "127.0.0.1:9", "--peer", process.address, "--json"))
        assert (copied["version"], copied["segment_bytes"]) == (loaded["version"], loaded["segment_bytes"])
        spread = ("--owners", "a,b,c", "--owner", "b", "--replicas", "2")
        part = document(on_other("load", "ple", "--peer", process.address, *spread, "--json"))
        assert part["version"] == loaded["version"]
        assert other.fabric.engram.describe("ple").segments[0].held
        again = document(on_other("load", "ple", "--peer", process.address, "--version", loaded["version"], "--json"))
        assert again["version"] == loaded["version"]
        assert not other.fabric.engram.describe("ple").segments[0].held
        status = document(on_other("status", "--json"))
        assert status["scrub_chunks_bad"] == status["scrub_chunks_repaired"] == 0
        with pytest.raises(NotFound):
            on_other("load", "elsewhere", "--peer", process.address)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--peer", "h:1"), "give the model's name"),
        (("ple", "--peer", "h:1", "--random"), "give one of"),
        (("ple", "--random", "--version", "ab"), "--version names"),
        (("ple", "--peer", "h:1", "--owners", "a,b"), "go together"),
        (("ple", "--peer", "h:1", "--owners", "a,b", "--owner", "c"), "one of a, b"),
        (("ple", "--peer", "h:1", "--owners", "a,b", "--owner", "a", "--replicas", "3"), "replicas"),
        (("--grown", "/x", "--owners", "a,b", "--owner", "a"), "kept whole"),
    ],
)
def test_peers_and_owners_that_make_no_sense_are_refused_before_a_call(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["load", *words, "--pool", "127.0.0.1:9"])
    assert isinstance(result.exception, InvalidArgument)
    assert message in str(result.exception)


def test_damaged_chunks_are_asked_of_peers_and_of_the_other_owners() -> None:
    settings = Settings(peers="p:1, q:2", owner="b", owners="a=x:1,b=y:2,c=p:1", api_key_file=None)
    assert settings.peer_list == ("p:1", "q:2", "x:1")
    assert Settings().peer_list == ()
    with pytest.raises(WrongSetting, match="peers"):
        Settings(peers="nohost")


def test_a_pool_that_asks_for_a_key_or_tls_is_reached_by_options_that_the_refusal_names(
    start_pool: StartPool, shm_folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret\n")
    with start_pool(shm_folder, "--api-key-file", str(keys)) as process:
        refused = CliRunner().invoke(app, ["ls", "--pool", process.address])
        assert "give --api-key-file FILE" in str(refused.exception)
        assert CliRunner().invoke(app, ["ls", "--pool", process.address, "--api-key-file", str(keys)]).exit_code == 0


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no openssl to make certificates with: apt-get install openssl"
)
def test_commands_show_a_certificate_to_a_pool_that_asks_for_one(tmp_path: Path) -> None:
    cert, key, both = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "both.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", "/CN=pool", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    tls = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-client-root-file", str(cert))
    child = subprocess.Popen(
        [
            sys.executable, "-m", "engram_pool", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
            "--segment-dir", str(tmp_path / "s"), *tls,
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        reach = ["--pool", json.loads(child.stdout.readline())["listen"], "--tls-root-file", str(cert)]
        assert CliRunner().invoke(app, ["ls", *reach]).exit_code != 0
        assert CliRunner().invoke(app, ["ls", *reach, "--tls-client-file", str(both)]).exit_code == 0
    finally:
        child.terminate()
        child.communicate(timeout=30)


def test_a_malformed_map_and_a_folder_without_tables_are_told_as_what_they_are(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--map takes ROLE=TENSOR"):
        run("load", "--checkpoint", tmp_path, "--map", "nonsense")
    with pytest.raises(TreadleError) as empty:
        run("load", "--checkpoint", tmp_path)
    assert "token map" not in str(empty.value)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TreadleError) as unknown:
        run("load", "--checkpoint", tmp_path)
    assert "token map" not in str(unknown.value)


@pytest.mark.parametrize("users", ["99999999999999999999", "4294967295", "1,-1"])
def test_user_ids_that_cannot_be_are_refused_by_the_settings(users: str) -> None:
    with pytest.raises(WrongSetting, match="ring_users: numeric ids up to 4294967294"):
        Settings(ring_users=users)
    assert Settings(ring_users="0,4294967294").ring_user_ids == (0, 4294967294)
