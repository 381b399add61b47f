"""HellaSwag: the batched scorer against a plain one, downloads from a server on this machine, the
command, and lm-evaluation-harness.
"""

import doctest
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SHARED_DATA, TINY, environment, run_script

import hellaswag
from hellaswag import evaluate, load_examples, render_example, score
from model import GPT, GPTConfig
from support import download as transfer
from support import rows
from support.common import UserError
from support.distributed import World
from support.download import blob_id
from support.examples import download, iterate_examples
from support.tokenizer import get_tokenizer

REAL = SHARED_DATA / "hellaswag_val_1000.jsonl"
TEXT = (
    "the man is seen riding a bike down on his own roof and then they walk together across some "
    "wet wood she smiles"
)


def made_examples(n: int, longest: int = 40) -> list[dict]:
    """Examples of very different lengths."""
    rng = np.random.default_rng(0)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(TEXT.split(), rng.integers(low, high)))

    return [
        dict(
            ind=i,
            ctx=text(2, longest),
            endings=[text(1, 20) + "." for _ in range(4)],
            label=int(rng.integers(4)),
        )
        for i in range(n)
    ]


def write_examples(path: Path, examples: list[dict]) -> None:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))


def some_examples(n: int) -> list[dict]:
    """n real examples from all over the file where it is here, else made ones."""
    if not REAL.exists():
        return made_examples(n)
    return list(iterate_examples("val", REAL))[:: 1000 // n][:n]


@torch.no_grad()
def plain_losses(logits_of, example: dict, window: int = 1 << 30) -> list[float]:
    """The reference: one ending at a time, logits of all positions, float32, nothing shared."""
    encode = get_tokenizer().encode_ordinary
    context = encode(example["ctx"])
    endings = [encode(" " + ending)[:window] for ending in example["endings"]]
    context = context[-max(1, window + 1 - max(map(len, endings))) :]
    losses = []
    for ending in endings:
        tokens = torch.tensor([context + ending])
        logp = F.log_softmax(logits_of(tokens[:, :-1])[0].float(), dim=-1)
        first = len(context) - 1  # it predicts the ending's first token
        losses.append(-sum(logp[first + i, token].item() for i, token in enumerate(ending)))
    return losses


def small_model(block_size: int = 256, seed: int = 0, **changes) -> GPT:
    """A tiny model far from its initialization: different endings get clearly different losses."""
    torch.manual_seed(seed)
    shape = dict(block_size=block_size, n_layer=2, n_head=2, n_embd=16) | changes
    model = GPT(GPTConfig(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def trained_model() -> GPT:
    """A small model after some steps on the contexts that it will be asked about."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=256, n_layer=2, n_head=2, n_embd=32))
    [optimizer] = model.configure_optimizers(learning_rate=1e-2)
    text = " ".join(example["ctx"] for example in some_examples(20))
    stream = torch.tensor(get_tokenizer().encode_ordinary(text))
    for step in range(12):
        at = 40 * step % (len(stream) - 65)
        _, loss = model(stream[None, at : at + 64], stream[None, at + 1 : at + 65])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def new_gpt2() -> GPT:
    """The 124M model as training begins with it."""
    torch.manual_seed(0)
    return GPT(GPTConfig())


# -- examples


def test_an_example_is_laid_out_as_build_nanogpt_does():
    encode = get_tokenizer().encode_ordinary
    example = dict(
        ctx="A man is sitting on a roof. he",
        endings=["falls.", "is here", "a b c d e", "x"],
        label=2,
    )
    tokens, mask, label = render_example(example)
    context = encode("A man is sitting on a roof. he")
    ending = encode(" falls.")
    assert tokens.shape == mask.shape == (4, len(context) + 5)
    assert tokens.dtype == torch.long and label == 2
    assert tokens[0].tolist() == context + ending + [0] * (5 - len(ending))
    assert mask[0].tolist() == [0] * len(context) + [1] * len(ending) + [0] * (5 - len(ending))
    assert mask[2].tolist() == [0] * len(context) + [1] * 5


def test_the_example_in_the_docstring_of_lay_out_is_true():
    result = doctest.testmod(rows)
    assert result.attempted > 0 and result.failed == 0


def test_the_text_of_a_special_token_in_an_example_is_plain_text():
    tokens, _, _ = render_example(dict(ctx="a <|endoftext|>", endings=["b"] * 4, label=0))
    assert 50256 not in tokens


GOOD = dict(ctx="a b", endings=["c", "d", "e", "f"], label=1)
NO_TEXTS = "line 2 has no list of texts under `endings`"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2 is not JSON"),
        (b"\xff\xfe\xff", "line 2 is not JSON"),
        (json.dumps(GOOD)[:-9], "line 2 is not JSON"),
        (json.dumps(GOOD | dict(endings=["c", "d", "e"])), "line 2 has 3 endings"),
        (json.dumps(GOOD | dict(endings="c")), NO_TEXTS),
        (json.dumps(GOOD | dict(endings=[1, 2, 3, 4])), NO_TEXTS),
        (json.dumps(GOOD | dict(ctx="")), "line 2 has no text under `ctx`"),
        (json.dumps(dict(label=1)), "line 2 has no text under `ctx`"),
        ("[1, 2]", "line 2 has no text under `ctx`"),
        (json.dumps(GOOD | dict(label=4)), "line 2 has the label 4"),
        (json.dumps(GOOD | dict(label=None)), "line 2 has the label None"),
        (json.dumps(GOOD | dict(label=True)), "line 2 has the label True"),
        (json.dumps(GOOD | dict(label=1.0)), "line 2 has the label 1.0"),
        (json.dumps(GOOD | dict(label=[1] * 999)), r"has the label .{1,40}: an example"),
        (json.dumps(GOOD | dict(label="1" * 999)), r"has the label .{1,40}: an example"),
        (json.dumps(GOOD | dict(ctx=7)), "line 2 has no text under `ctx`"),
        (json.dumps(GOOD | dict(endings=dict(a="c"))), NO_TEXTS),
        ("[" * 200_000, "line 2 is not JSON"),
        (b"\0" * 64, "line 2 is not JSON"),
        ("1" * 9999, "line 2 is not JSON"),
        ("null", "line 2 has no text under `ctx`"),
    ],
)
def test_a_malformed_line_is_one_sentence_with_its_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + bad + b"\n")
    with pytest.raises(UserError, match=message) as error:
        list(iterate_examples("val", path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_file_that_is_empty_or_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    os.mkfifo(tmp_path / "pipe")
    messages = {
        "empty.jsonl": "is empty",
        "absent.jsonl": "cannot be read .No such file",
        "a" * 300: "cannot be read .File name too long",
        "": "is no file",
        "pipe": "is no file",
    }
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            list(iterate_examples("val", tmp_path / name))


def test_labels_may_be_written_as_text_and_blank_lines_skipped(tmp_path):
    path = tmp_path / "hub.jsonl"
    path.write_text(json.dumps(GOOD | dict(label="3")) + "\n\n" + json.dumps(GOOD))
    assert [render_example(example)[2] for example in iterate_examples("val", path)] == [3, 1]


def test_a_limit_beyond_all_examples_takes_all(tmp_path):
    write_examples(tmp_path / "two.jsonl", [GOOD, GOOD])
    for limit, expected in ((0, 2), (1, 1), (2, 2), (10**20, 2)):
        found = load_examples("val", tmp_path / "two.jsonl", limit, World("cpu"))
        assert len(found) == expected


# -- scores


@pytest.mark.parametrize("make", [small_model, trained_model])
def test_losses_and_predictions_equal_the_plain_reference(make):
    model = make()
    examples = some_examples(20)
    losses, lengths, truncated = score(model, examples, "cpu")
    expected = np.array([plain_losses(lambda idx: model(idx)[0], example) for example in examples])
    encode = get_tokenizer().encode_ordinary
    endings = [example["endings"] for example in examples]
    assert lengths.tolist() == [[len(encode(" " + ending)) for ending in four] for four in endings]
    assert truncated == 0 and np.abs(losses - expected).max() < 1e-3
    assert (losses.argmin(1) == expected.argmin(1)).all()
    assert ((losses / lengths).argmin(1) == (expected / lengths).argmin(1)).all()
    labels = np.array([example["label"] for example in examples])
    result = evaluate(model, examples, "cpu")
    assert result["num_correct"] == (expected.argmin(1) == labels).sum()
    assert result["num_correct_norm"] == ((expected / lengths).argmin(1) == labels).sum()
    assert result["acc"] == result["num_correct"] / 20 and result["total"] == 20
    assert result["acc_stderr"] == pytest.approx((result["acc"] * (1 - result["acc"]) / 19) ** 0.5)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not REAL.exists(), reason="needs the 1,000 real examples")
@pytest.mark.parametrize("make", [trained_model, new_gpt2])
def test_all_real_examples_equal_the_plain_reference(make):
    model = make()
    examples = list(iterate_examples("val", REAL))
    losses, lengths, _ = score(model, examples, "cpu")
    expected = np.array([plain_losses(lambda idx: model(idx)[0], example) for example in examples])
    assert np.abs(losses - expected).max() < 1e-3
    assert (losses.argmin(1) == expected.argmin(1)).all()
    assert ((losses / lengths).argmin(1) == (expected / lengths).argmin(1)).all()


def test_the_size_of_a_batch_changes_nothing():
    model = small_model()
    examples = made_examples(12)
    expected, _, _ = score(model, examples, "cpu")
    for tokens_per_batch in (1, 100, 333, 10**6):
        losses, _, _ = score(model, examples, "cpu", tokens_per_batch=tokens_per_batch)
        np.testing.assert_allclose(losses, expected, atol=1e-4)


@pytest.mark.parametrize("window", [64, 24, 8])
def test_contexts_beyond_the_window_are_cut_at_the_left_and_counted(window):
    model = small_model(window)
    examples = made_examples(12, longest=90)
    losses, lengths, truncated = score(model, examples, "cpu")
    plain = [plain_losses(lambda idx: model(idx)[0], example, window) for example in examples]
    expected = np.array(plain)
    np.testing.assert_allclose(losses, expected, atol=1e-3)
    longest = [render_example(example)[0].size(1) for example in examples]
    assert truncated == sum(N - 1 > window for N in longest) > 0
    assert evaluate(model, examples, "cpu")["num_truncated"] == truncated
    assert lengths.max() <= window


def test_bfloat16_stays_close_to_float32():
    model = small_model(n_embd=32)
    examples = made_examples(8)
    losses, _, _ = score(model, examples, "cpu")
    low, _, _ = score(model, examples, "cpu", dtype=torch.bfloat16)
    assert 0 < np.abs(low / losses - 1).max() < 0.02


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_transformers_model_gets_the_plain_references_score(family):
    import transformers

    sizes = dict(
        GPT2=dict(n_positions=64, n_layer=2, n_head=2, n_embd=16),
        Llama=dict(
            max_position_embeddings=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_size=16,
            intermediate_size=32,
        ),
    )
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**sizes[family], vocab_size=50257, pad_token_id=0)
    config.initializer_range = 0.3
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    examples = made_examples(6, longest=60)
    losses, _, truncated = score(model, examples, "cpu")
    assert model.training and truncated > 0
    model.eval()
    plain = [plain_losses(lambda idx: model(idx).logits, example, 64) for example in examples]
    expected = np.array(plain)
    np.testing.assert_allclose(losses, expected, atol=1e-3)


def test_a_model_with_another_vocabulary_brings_its_own_encoding():
    model = small_model(vocab_size=256)
    examples = made_examples(4)
    losses, lengths, _ = score(model, examples, "cpu", encode=lambda text: list(text.encode()))
    assert lengths[0, 0] == len(" " + examples[0]["endings"][0]) and np.isfinite(losses).all()


def test_scoring_leaves_modes_and_random_state_alone_even_when_it_fails():
    model = small_model()
    examples = made_examples(3)
    model.train()
    model.transformer.h[1].eval()  # a part that was in another mode stays in it
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    evaluate(model, examples, "cpu")
    with pytest.raises(IndexError):  # a token that the embedding does not have
        evaluate(model, examples, "cpu", encode=lambda text: [10**6])
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "strange",
    [
        dict(ctx=" " * 1_200_000 + "word"),
        dict(ctx=" "),
        dict(ctx="\udcff"),
        dict(endings=["", "  ", "\n", "\ud83d"]),
        dict(endings=["a", TEXT * 9, "c", "d"]),  # longer than the window
    ],
    ids=["spaces before a word", "a space", "a surrogate", "no words", "a long ending"],
)
def test_strange_texts_are_scored_as_the_plain_reference_does(strange):
    model = small_model(64)
    example = GOOD | strange
    losses, _, _ = score(model, [example], "cpu")
    if len(example["ctx"]) > 10**6:  # which stops tiktoken; what does not fit is cut away, anyhow
        example = example | dict(ctx=example["ctx"][-1000:])
    expected = [plain_losses(lambda idx: model(idx)[0], example, 64)]
    np.testing.assert_allclose(losses, expected, atol=1e-3)


def test_a_model_with_another_vocabulary_is_one_sentence():
    with pytest.raises(UserError, match="a vocabulary of 300: its tokens are not GPT-2's"):
        evaluate(small_model(vocab_size=300), made_examples(2), "cpu")


def test_losses_that_are_not_finite_are_one_sentence():
    model = small_model()
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = math.nan
    with pytest.raises(UserError, match="losses are infinite or not a number"):
        evaluate(model, made_examples(2), "cpu")


def test_no_examples_and_no_labels_are_one_sentence():
    unlabelled = {k: v for k, v in GOOD.items() if k != "label"}
    for examples, message in (
        ([], "no examples"),
        ([unlabelled], "without labels"),
        ([GOOD | dict(endings=["a"])], "1 endings"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(small_model(), examples, "cpu")
    with pytest.raises(UserError, match="no label"):
        render_example(unlabelled)


def test_scoring_between_compiled_steps_compiles_nothing_and_changes_nothing():
    from torch._dynamo.utils import counters

    def losses(with_score: bool) -> tuple[list[float], int]:
        torch._dynamo.reset()
        counters.clear()
        raw = small_model(64)
        examples = made_examples(3)
        model = torch.compile(raw, backend="aot_eager", dynamic=False)
        (optimizer,) = raw.configure_optimizers()
        idx = torch.arange(33)[None]
        values = []
        for _ in range(3):
            if with_score:
                assert evaluate(raw, examples, "cpu") == evaluate(model, examples, "cpu")
            _, loss = model(idx[:, :-1], idx[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values, counters["stats"]["unique_graphs"]

    without, graphs = losses(False)
    assert losses(True) == (without, graphs) and graphs > 0


SCORED_RUN = """
import sys
from torch._dynamo.utils import counters
import hellaswag, train_gpt2

evaluate = hellaswag.evaluate
prepared = []

def counted(model, examples, *args, **options):
    result = evaluate(model, examples, *args, **options)
    prepared.append(examples)
    print("graphs", counters["stats"]["unique_graphs"])
    return result

hellaswag.evaluate = counted
sys.argv[0] = "train_gpt2.py"
train_gpt2.main()
assert all(examples is prepared[0] for examples in prepared)  # laid out once a run
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_with_hellaswag_is_the_run_without_it_and_compiles_it_once(tmp_path, shards):
    examples = tmp_path / "examples.jsonl"
    write_examples(examples, made_examples(30))  # several batches
    flags = f"--compile --data-dir {shards} --checkpoint-every 6 --hellaswag-path {examples}"
    where = dict(cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    runs = [tmp_path / f"every{every}" for every in (0, 2)]
    for run, every in zip(runs, ("0", "2"), strict=True):
        log = ["--log-dir", str(run), "--hellaswag-every", every]
        launch = [sys.executable, "-c", SCORED_RUN, *TINY, *flags.split(), *log]
        done = subprocess.run(launch, **where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    without, with_score = [(run / "log.txt").read_text().splitlines() for run in runs]
    scored = [line.split()[:2] for line in with_score if "hella" in line]
    assert scored == [[str(step), "hella"] for step in (0, 2, 4, 6)]
    assert without == [line for line in with_score if "hella" not in line] and len(without) >= 6
    weights = [(run / "ckpt_000006" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    graphs = [int(line.split()[1]) for line in done.stdout.splitlines() if "graphs" in line]
    # the first evaluation compiles a block, the update after it one more; then nothing
    assert len(graphs) == 4 and 0 < graphs[0] <= graphs[1] == graphs[2] == graphs[3]


def test_all_batches_have_one_shape_and_together_every_target_once():
    examples = made_examples(40)
    for tokens_per_batch in (400, 1200, 5000):
        prepared = hellaswag.prepare(examples, small_model(), "cpu", None, tokens_per_batch)
        shapes = {tuple(batch.tokens.shape) for batch in prepared.batches}
        assert shapes == {(len(prepared.batches[0].tokens), 256)}
        slots = torch.cat([batch.slots for batch in prepared.batches])
        assert slots.bincount().tolist() == prepared.lengths.flatten().tolist()
        taken = sum(len(batch.tokens) for batch in prepared.batches)
        used = sum(int((batch.part != hellaswag.PADDING).sum()) for batch in prepared.batches)
        assert used > 0.75 * 256 * (taken - len(prepared.batches))  # little room is wasted


# -- download

CONTENT = (json.dumps(GOOD) + "\n").encode() * 50
IDS = {"val": blob_id(CONTENT)}


@pytest.fixture
def server():
    """A server on this machine that gives its `answers` in turn, the last one for ever.

    Each is (status, body, announced length).
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            turn = min(len(self.server.asked), len(self.server.answers)) - 1
            status, body, length = self.server.answers[turn]
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.asked = []
    httpd.url = f"http://127.0.0.1:{httpd.server_port}/hellaswag_{{split}}.jsonl"
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


WHOLE = (200, CONTENT, len(CONTENT))
BUSY = (503, b"", 0)
HALF = (200, CONTENT[:99], len(CONTENT))
OTHER = (200, b"<html>", 6)


def test_git_names_contents_as_blob_id_does():
    # echo hello | git hash-object --stdin
    assert blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_split_is_downloaded_once(server, tmp_path):
    server.answers = [WHOLE]
    for _ in range(2):
        path = download("val", tmp_path / "new", server.url, IDS)
        assert path == tmp_path / "new" / "hellaswag_val.jsonl" and path.read_bytes() == CONTENT
    assert server.asked == ["/hellaswag_val.jsonl"]


@pytest.mark.parametrize("failure", [BUSY, HALF, OTHER])
def test_a_failed_transfer_is_tried_again_and_leaves_nothing_behind(server, tmp_path, failure):
    server.answers = [failure, failure, WHOLE]
    with pytest.raises(UserError) as error:
        download("val", tmp_path, server.url, IDS, attempts=2, patience=0)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [] and len(server.asked) == 2
    assert download("val", tmp_path, server.url, IDS, patience=0).read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["hellaswag_val.jsonl"]


@pytest.mark.parametrize(
    ("answer", "message", "asked"),
    [
        (HALF, "the transfer broke off", 3),
        (OTHER, "6 bytes with blob id", 3),
        (BUSY, "HTTP 503", 3),
        ((404, b"", 0), "HTTP 404", 1),
    ],
)
def test_a_download_that_cannot_succeed_says_what_came(
    server, tmp_path, monkeypatch, answer, message, asked
):
    server.answers = [answer]
    waited = []
    # this file's own sleep, not everybody's: another thread of the process may be polling
    monkeypatch.setattr(transfer, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(UserError, match=message):
        download("val", tmp_path, server.url, IDS)
    assert len(server.asked) == asked and waited == [1, 2][: asked - 1]


def test_a_damaged_file_that_is_already_there_is_not_used(tmp_path):
    (tmp_path / "hellaswag_val.jsonl").write_bytes(CONTENT[:-5])
    with pytest.raises(UserError, match=r"is not the official file .* delete it"):
        download("val", tmp_path, "http://127.0.0.1:9/", IDS)


def test_without_a_network_the_answer_comes_in_seconds(tmp_path, monkeypatch):
    import requests

    start = time.monotonic()
    with pytest.raises(UserError, match="no connection"):  # a port where nobody listens
        download("val", tmp_path, "http://127.0.0.1:9/", IDS)
    assert time.monotonic() - start < 4
    # a resolver that does not come back
    monkeypatch.setattr(requests, "get", lambda *_, **__: time.sleep(60))
    told = transfer.fetch("http://127.0.0.1:9/", seconds=0.1)[1:]
    assert told == ("no answer within 0.1 seconds", False)


def test_an_unknown_split_is_named(tmp_path):
    with pytest.raises(UserError, match="no split 'dev': use one of train, val, test"):
        download("dev", tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(server, tmp_path):
    server.answers = [WHOLE]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        download("val", tmp_path / "file", server.url, IDS)


# -- the command


@pytest.fixture
def files(tmp_path):
    """A model directory and a file of examples."""
    small_model(128).save_pretrained(tmp_path / "model")
    write_examples(tmp_path / "examples.jsonl", made_examples(21))
    return tmp_path


@pytest.mark.parametrize("tokens_per_batch", [64, 1024])
def test_processes_without_a_batch_of_their_own_still_agree(tokens_per_batch):
    class Pretended(World):
        """Rank r of 3, in this process; its sums are taken below."""

        def __init__(self, rank):
            self.rank = rank
            self.size = 3
            self.is_main = rank == 0

        def sum(self, x):
            return x

    model = small_model()
    examples = made_examples(5)
    budget = dict(tokens_per_batch=tokens_per_batch)
    parts = [score(model, examples, "cpu", world=Pretended(r), **budget)[0] for r in range(3)]
    whole, _, _ = score(model, examples, "cpu", **budget)
    assert np.array_equal(sum(parts), whole)


def test_one_two_and_three_processes_give_the_same_result(files):
    results = []
    for ranks in (1, 2, 3):
        flags = f"--model model --path examples.jsonl --json {ranks}.json --device cpu"
        args = [*flags.split(), "--dtype", "float32"]
        done = run_script("hellaswag.py", *args, ranks=ranks, cwd=files)
        results.append(json.loads((files / f"{ranks}.json").read_text()) | dict(seconds=0))
        assert done.stdout.count("acc_norm") == 1 and f"on {ranks} × cpu, float32" in done.stdout
    assert results[0] == results[1] == results[2] and results[0]["total"] == 21
    assert "smallest mean loss per token of the ending" in done.stdout and "±" in done.stdout


def run_main(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", *map(str, args), "--device", "cpu"])
    hellaswag.main()


def test_the_command_takes_the_first_examples_and_prints_what_the_numbers_mean(
    files, monkeypatch, capsys
):
    flags = f"--model {files}/model --path {files}/examples.jsonl --limit 4"
    run_main(monkeypatch, *flags.split())
    out = capsys.readouterr().out
    expected = evaluate(GPT.from_pretrained(files / "model"), made_examples(4), "cpu")
    assert f"{expected['num_correct']}/4  (smallest summed loss of the ending)" in out
    assert "published" not in out


def test_published_numbers_are_printed_beside_the_same_model_on_all_examples(capsys):
    result = evaluate(small_model(), made_examples(3), "cpu")
    hellaswag.report("gpt2", result, complete=True)
    out = capsys.readouterr().out
    assert "published 0.2859" in out and "published 0.2955" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--limit", "-1"], "--limit -1: 0 .all examples. or more"),
        (["--json", "/nowhere/out.json"], "no file can be made in /nowhere .No such file"),
        (["--json", "/dev/null/out.json"], "no file can be made in /dev/null .Not a directory"),
        (["--json", "/proc/out.json"], "no file can be made in /proc "),
        (["--json", "/"], "--json / is a directory"),
        (["--path", "/nowhere/val.jsonl"], "/nowhere/val.jsonl cannot be read .No such file"),
        (["--path", "/"], "/ is no file"),
    ],
)
def test_a_users_mistake_is_one_sentence_before_any_work(monkeypatch, args, message):
    with pytest.raises(UserError, match=message):
        run_main(monkeypatch, "--model", "/nowhere/model", *args)


def test_a_mistake_is_one_line_on_stderr(tmp_path):
    (tmp_path / "val.jsonl").write_bytes(b"\x80\x04 binary")
    flags = f"--path {tmp_path}/val.jsonl --device cpu".split()
    done = run_script("hellaswag.py", *flags, expect=1)
    assert done.stderr.startswith(f"hellaswag.py: {tmp_path}/val.jsonl, line 1 is not JSON")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_where_one_process_fails_all_do(tmp_path):
    class Pretended(World):
        def __init__(self):
            self.rank = 1
            self.size = 2
            self.is_main = False

        def any(self, flag):
            return True  # the main process could not download

    with pytest.raises(UserError, match="another process"):
        load_examples("val", tmp_path / "absent.jsonl", 0, Pretended())


def test_importing_hellaswag_imports_neither_transformers_nor_requests():
    code = (
        "import sys, hellaswag; heavy = ('transformers', 'requests', 'datasets', 'tiktoken'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    launch = [sys.executable, "-c", code]
    told = subprocess.check_output(launch, cwd=ROOT, env=environment(), text=True)
    assert told.strip() == "[]"


# -- lm-evaluation-harness

TASK = """
task: local_hellaswag
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.mark.torture  # its requirements are those of `make torture`
def test_lm_evaluation_harness_gives_a_checkpoint_of_training_the_same_score(tmp_path, shards):
    examples = some_examples(100)
    log_dir = tmp_path / "log"
    flags = f"--data-dir {shards} --log-dir {log_dir} --checkpoint-every 6 --sequence-length 512"
    flags += " --batch-size 1 --total-batch-size 512 --max-steps 6"
    run_script("train_gpt2.py", *TINY, *flags.split())
    checkpoint = log_dir / "ckpt_000006"
    write_examples(tmp_path / "examples.jsonl", examples)
    (tmp_path / "local_hellaswag.yaml").write_text(TASK.format(path=tmp_path / "examples.jsonl"))
    flags = f"--model hf --model_args pretrained={checkpoint},dtype=float32 --device cpu"
    flags += f" --tasks local_hellaswag --include_path {tmp_path}"
    flags += f" --log_samples --output_path {tmp_path}/out"
    offline = environment(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HOME=str(tmp_path / "cache"),
    )
    launch = [sys.executable, "-m", "lm_eval", *flags.split()]
    done = subprocess.run(launch, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    theirs = {record["doc_id"]: record for record in records}
    losses, _, _ = score(GPT.from_pretrained(checkpoint), examples, "cpu")
    for n, (ours, example) in enumerate(zip(losses, examples, strict=True)):
        loglikelihoods = [float(response[0]) for response in theirs[n]["filtered_resps"]]
        np.testing.assert_allclose(-ours, loglikelihoods, atol=1e-3)
        assert theirs[n]["acc"] == float(ours.argmin() == example["label"])
