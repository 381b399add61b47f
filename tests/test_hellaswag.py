"""HellaSwag: the batched scorer against a plain one, downloads from a server on this machine, the
command, and lm-evaluation-harness.
"""

import hashlib
import http.server
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, environment, run_script

import hellaswag
from hellaswag import evaluate, iterate_examples, load_examples, render_example, score
from model import GPT, GPTConfig
from support.base.errors import UserError
from support.machine.distributed import World, start_world
from support.text.tokenizer import gpt2

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
        dict(ctx=text(2, longest), endings=[text(1, 20) + "." for _ in range(4)], label=i % 4)
        for i in range(n)
    ]


def write_examples(path: Path, examples: list[dict]) -> None:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))


@torch.no_grad()
def plain_losses(model: GPT, example: dict, window: int) -> list[float]:
    """The reference: one ending at a time, logits of all positions, float32, nothing shared."""
    encode = gpt2().encoding.encode_ordinary
    context = encode(example["ctx"])
    endings = [encode(" " + ending)[:window] for ending in example["endings"]]
    context = context[-max(1, window + 1 - max(map(len, endings))) :]
    losses = []
    for ending in endings:
        tokens = torch.tensor([context + ending])
        logp = F.log_softmax(model(tokens[:, :-1])[0][0].float(), dim=-1)
        first = len(context) - 1  # it predicts the ending's first token
        losses.append(-sum(logp[first + i, token].item() for i, token in enumerate(ending)))
    return losses


def small_model(block_size: int = 256, **changes) -> GPT:
    """A tiny model far from its initialization: different endings get clearly different losses."""
    torch.manual_seed(0)
    shape = dict(block_size=block_size, n_layer=2, n_head=2, n_embd=16) | changes
    model = GPT(GPTConfig(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def all_plain_losses(model: GPT, examples: list[dict]) -> np.ndarray:
    window = model.config.block_size
    return np.array([plain_losses(model, example, window) for example in examples])


# -- examples


def test_an_example_is_laid_out_as_build_nanogpt_does():
    encode = gpt2().encoding.encode_ordinary
    endings = ["falls.", "is here", "a b c d e", "x"]
    example = dict(ctx="A man is sitting on a roof. he", endings=endings, label=2)
    tokens, mask, label = render_example(example)
    context = encode(example["ctx"])
    ending = encode(" falls.")
    assert tokens.shape == mask.shape == (4, len(context) + 5)
    assert tokens.dtype == torch.long and label == 2
    assert tokens[0].tolist() == context + ending + [0] * (5 - len(ending))
    assert mask[0].tolist() == [0] * len(context) + [1] * len(ending) + [0] * (5 - len(ending))
    tokens, _, _ = render_example(example | dict(ctx="a <|endoftext|>"))
    assert 50256 not in tokens  # the text of a special token is plain text


def test_the_drawing_in_row_is_true_with_1_to_8_for_a_to_h():
    [row] = hellaswag.lay_out([1, 2, 3], [[4, 5], [6, 7, 8]], first_slot=0, width=16)
    assert row.columns == [(1, 0, 0), (2, 1, 0), (3, 2, 0), (4, 3, 1), (6, 3, 2), (7, 4, 2)]
    assert row.targets == [(2, 4, 0), (3, 5, 0), (2, 6, 1), (4, 7, 1), (5, 8, 1)]


GOOD = dict(ctx="a b", endings=["c", "d", "e", "f"], label=1)


WRONG = [("endings", value) for value in (["c"] * 3, "cdef", [1, 2, 3, 4], [""] * 4)]
WRONG += [("label", value) for value in (4, None, True, [1] * 999)] + [("ctx", ""), ("ctx", 7)]
LINES = [b"{not json", b"\xff\xfe", b"[1, 2]", json.dumps(GOOD)[:-9].encode()]
LINES += [json.dumps(GOOD | {field: value}).encode() for field, value in WRONG]
MISTAKES = {
    json.dumps(GOOD).encode() + b"\n" + line: "line 2, as JSON with .* cannot be read"
    for line in LINES
}


@pytest.mark.parametrize(("content", "message"), [*MISTAKES.items(), (b"\n \n\t\n", "is empty")])
def test_a_malformed_file_is_one_short_sentence_with_the_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.jsonl.* {message}") as error:
        list(iterate_examples(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(tmp_path))


def test_labels_may_be_text_blank_lines_are_skipped_and_a_limit_is_spread_over_the_file(tmp_path):
    path = tmp_path / "hub.jsonl"
    path.write_text("\n\n".join(json.dumps(GOOD | dict(label=str(n))) for n in range(4)))
    for limit, labels in ((0, [0, 1, 2, 3]), (1, [0]), (2, [0, 2]), (10**20, [0, 1, 2, 3])):
        examples = load_examples(path, limit, start_world("cpu"))
        assert [render_example(example)[2] for example in examples] == labels


# -- scores


def test_losses_and_predictions_equal_the_plain_reference(monkeypatch):
    model = small_model()
    examples = made_examples(20)
    prepared = hellaswag.prepare(examples, model, "cpu")
    lengths = prepared.lengths
    losses = score(model, prepared, "cpu")
    expected = all_plain_losses(model, examples)
    encode = gpt2().encoding.encode_ordinary
    endings = [example["endings"] for example in examples]
    assert lengths.tolist() == [[len(encode(" " + ending)) for ending in four] for four in endings]
    assert prepared.truncated == 0
    assert np.abs(losses - expected).max() < 1e-3
    assert (losses.argmin(1) == expected.argmin(1)).all()
    labels = np.array([example["label"] for example in examples])
    result = evaluate(model, examples, "cpu")
    assert result["total"] == 20
    assert result["num_correct"] == (expected.argmin(1) == labels).sum()
    assert result["num_correct_norm"] == ((expected / lengths).argmin(1) == labels).sum()
    assert result["acc"] == result["num_correct"] / 20
    assert result["acc_stderr"] == pytest.approx((result["acc"] * (1 - result["acc"]) / 19) ** 0.5)
    for tokens_per_batch in (1, 10**6):
        monkeypatch.setattr(hellaswag, "CPU_TOKENS", tokens_per_batch)
        np.testing.assert_allclose(score(model, examples, "cpu"), losses, atol=1e-4)


STRANGE = [
    dict(ctx=" " * 1_200_000 + "word"),  # so many spaces stop tiktoken
    dict(ctx=" "),
    dict(ctx="\udcff"),
    dict(endings=["", "  ", "\n", "\ud83d"]),
    dict(endings=["a", TEXT * 9, "c", "d"]),  # longer than the window
]


@pytest.mark.parametrize("window", [64, 24, 8])
def test_strange_texts_and_contexts_cut_at_the_left_are_scored_as_the_reference_does(window):
    model = small_model(window)
    examples = made_examples(12, longest=90) + [GOOD | strange for strange in STRANGE]
    prepared = hellaswag.prepare(examples, model, "cpu")
    losses = score(model, prepared, "cpu")
    ends = [example | dict(ctx=example["ctx"][-1000:]) for example in examples]
    np.testing.assert_allclose(losses, all_plain_losses(model, ends), atol=1e-3)
    longest = [render_example(example)[0].size(1) for example in examples]
    truncated = sum(N - 1 > window for N in longest)
    assert evaluate(model, examples, "cpu")["num_truncated"] == truncated > 0
    assert prepared.lengths.max() <= window


def test_bfloat16_stays_close_to_float32():
    model = small_model(n_embd=32)
    examples = made_examples(8)
    losses = score(model, examples, "cpu")
    low = score(model, examples, "cpu", dtype=torch.bfloat16)
    assert 0 < np.abs(low / losses - 1).max() < 0.02


def test_scoring_leaves_modes_and_random_state_alone_even_when_it_is_interrupted():
    def interrupt():
        raise InterruptedError

    model = small_model()
    model.train()
    model.transformer.h[1].eval()  # a part that was in another mode stays in it
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    evaluate(model, made_examples(3), "cpu")
    with pytest.raises(InterruptedError):
        evaluate(model, made_examples(3), "cpu", stop=SimpleNamespace(vote=interrupt))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_scored_is_one_sentence():
    spoiled = small_model()
    with torch.no_grad():
        spoiled.transformer.ln_f.weight[3] = math.nan
    unlabelled = {k: v for k, v in GOOD.items() if k != "label"}
    for model, examples, message in (
        (small_model(vocab_size=300), [GOOD], "has 300 tokens, its tokenizer 50257"),
        (spoiled, [GOOD], "losses are infinite or NaN"),
        (small_model(), [GOOD, unlabelled], "without labels"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(model, examples, "cpu")


def test_scoring_between_compiled_steps_changes_nothing_and_compiles_once():
    from torch._dynamo.utils import counters

    def train(with_score: bool) -> tuple[list[float], int]:
        torch._dynamo.reset()
        counters.clear()
        model = small_model()
        for block in model.transformer.h:  # as device.compile_blocks does it
            block.forward = torch.compile(block.forward, backend="aot_eager", dynamic=False)
        [optimizer] = model.configure_optimizers()
        prepared = hellaswag.prepare(made_examples(30), model, "cpu")
        assert len(prepared.batches) > 1
        idx = torch.arange(33)[None]
        losses = []
        for _ in range(3):
            if with_score:
                evaluate(model, prepared, "cpu")
            _, loss = model(idx[:, :-1], idx[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, counters["stats"]["unique_graphs"]

    losses, graphs = train(with_score=False)
    losses_with_score, graphs_with_score = train(with_score=True)
    assert losses_with_score == losses
    assert graphs_with_score == graphs + 1


def test_all_batches_have_one_shape_and_together_every_target_once(monkeypatch):
    examples = made_examples(40)
    for tokens_per_batch in (400, 1200, 5000):
        monkeypatch.setattr(hellaswag, "CPU_TOKENS", tokens_per_batch)
        prepared = hellaswag.prepare(examples, small_model(), "cpu")
        columns, targets = zip(*prepared.batches, strict=True)
        assert {tuple(some.shape) for some in columns} == {(len(columns[0]), 256, 3)}
        slots = torch.cat([some[:, 3] for some in targets])
        assert slots.bincount().tolist() == prepared.lengths.flatten().tolist()
        taken = sum(len(some) for some in columns)
        used = sum(int((some[..., 2] >= 0).sum()) for some in columns)
        assert used > 0.75 * 256 * (taken - len(columns))  # little room is wasted


# -- download

CONTENT = (json.dumps(GOOD) + "\n").encode() * 50


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server on this machine that gives its `answers` in turn, the last one for ever.

    Each is (status, body, announced length). The official file is CONTENT.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body, length = httpd.answers[min(len(httpd.asked), len(httpd.answers) - 1)]
            httpd.asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        hellaswag, "URL", f"http://127.0.0.1:{httpd.server_port}/hellaswag_val.jsonl"
    )
    blob = b"blob %d\0" % len(CONTENT) + CONTENT  # as git does it
    monkeypatch.setattr(hellaswag, "BLOB_ID", hashlib.sha1(blob).hexdigest())
    monkeypatch.setattr("urllib3.util.Retry.sleep", lambda *_: None)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


WHOLE = (200, CONTENT, len(CONTENT))
BUSY = (503, b"", 0)
HALF = (200, CONTENT[:99], len(CONTENT))


@pytest.mark.parametrize("answers", [[WHOLE], [BUSY, BUSY, WHOLE]])
def test_a_split_is_downloaded_once_from_a_server_that_may_be_busy(server, answers):
    server.answers = answers
    for _ in range(2):
        assert list(iterate_examples("val")) == [GOOD] * 50
    assert server.asked == ["/hellaswag_val.jsonl"] * len(answers)


@pytest.mark.parametrize("answer", [HALF, BUSY, (404, b"", 0)])
def test_a_download_that_fails_is_one_sentence_and_leaves_nothing(server, tmp_path, answer):
    server.answers = [answer]
    with pytest.raises(UserError, match=r"HellaSwag cannot be read .*--hellaswag-path") as error:
        list(iterate_examples())
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [CONTENT[:-5], b"<html>", b""])
def test_another_file_than_the_official_one_is_not_used(server, tmp_path, content):
    server.answers = [(200, content, len(content))]
    for _ in range(2):  # just downloaded, and found
        with pytest.raises(UserError, match="is not HellaSwag's official file: delete it"):
            list(iterate_examples())
    (tmp_path / "hellaswag" / "hellaswag_val.jsonl").unlink()
    server.answers = [WHOLE]
    assert len(list(iterate_examples())) == 50


def test_without_a_network_the_answer_comes_in_seconds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hellaswag, "URL", "http://127.0.0.1:9/none")  # where nobody listens
    start = time.monotonic()
    with pytest.raises(UserError, match=r"refused.*--path"):
        list(iterate_examples())
    assert time.monotonic() - start < 4


# -- the command


class Pretended(World):
    """Rank r of 3, in this process; the test adds its sums."""

    def __init__(self, rank):
        super().__init__(torch.device("cpu"), rank, size=3)

    def sum(self, x):
        return x


@pytest.mark.parametrize("tokens", [64, 1024])
def test_processes_without_a_batch_of_their_own_run_the_model_too_and_agree(tokens, monkeypatch):
    monkeypatch.setattr(hellaswag, "CPU_TOKENS", tokens)
    model = small_model()
    prepared = hellaswag.prepare(made_examples(5), model, "cpu")
    whole = score(model, prepared, "cpu")
    with mock.patch.object(model, "hidden", wraps=model.hidden) as hidden:  # fsdp gathers there
        parts = [score(model, prepared, "cpu", world=Pretended(r)) for r in range(3)]
    assert hidden.call_count == 3 * math.ceil(len(prepared.batches) / 3)
    assert np.array_equal(sum(parts), whole)


def test_two_processes_give_the_result_of_one_for_some_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small_model(128).save_pretrained("model")
    write_examples(Path("examples.jsonl"), made_examples(21))
    flags = "--model model --path examples.jsonl --dtype float32 --device cpu --limit 15 --json"
    hellaswag.main([*flags.split(), "1.json"])
    done = run_script("hellaswag.py", *flags.split(), "2.json", ranks=2, cwd=tmp_path)
    one, two = [json.loads(Path(f"{n}.json").read_text()) | dict(seconds=0) for n in (1, 2)]
    assert one == two
    some = [made_examples(21)[i * 21 // 15] for i in range(15)]
    right = evaluate(GPT.from_pretrained("model"), some, "cpu")
    printed = capsys.readouterr().out
    for name in ("acc", "acc_norm"):
        assert one[name] == right[name]
        value = f"{name:8} {right[name]:.4f} ± {right[name + '_stderr']:.4f}"
        assert printed.count(value) == done.stdout.count(value) == 1


@pytest.mark.parametrize("path", ["absent/1.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_read(path, tmp_path):
    with pytest.raises(UserError, match=f"--json {path}: name a file in a directory"):
        hellaswag.main(["--json", path, "--path", "absent.jsonl", "--device", "cpu"])


def test_where_the_main_process_cannot_read_the_others_fail_too(monkeypatch):
    monkeypatch.setattr(Pretended, "any", lambda world, flag: True)
    with pytest.raises(UserError, match="another process"):
        load_examples("absent.jsonl", 0, Pretended(1))


def test_importing_hellaswag_imports_neither_transformers_nor_requests():
    code = "import sys, hellaswag; print({'transformers', 'requests', 'tiktoken'} & {*sys.modules})"
    told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment())
    assert told.strip() == b"set()"


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
@pytest.mark.parametrize("vocabulary", ["--tokenizer gpt2", "--vocab-size 1024"])
def test_lm_evaluation_harness_gives_a_checkpoint_of_training_the_same_score(tmp_path, vocabulary):
    examples = made_examples(100)
    log_dir = tmp_path / "log"
    data_dir = tmp_path / "data"
    flags = f"--source tinyshakespeare --data-dir {data_dir} {vocabulary}"
    run_script("fineweb.py", *flags.split())
    flags = f"--data-dir {data_dir} --log-dir {log_dir} --checkpoint-every 6 --sequence-length 512"
    flags += " --batch-size 1 --total-batch-size 512 --max-steps 6"
    run_script("train_gpt2.py", *TINY, *flags.split())
    checkpoint = log_dir / "ckpt_000006"
    write_examples(tmp_path / "examples.jsonl", examples)
    (tmp_path / "local_hellaswag.yaml").write_text(TASK.format(path=tmp_path / "examples.jsonl"))
    flags = f"--model hf --model_args pretrained={checkpoint},dtype=float32 --device cpu"
    flags += f" --tasks local_hellaswag --include_path {tmp_path}"
    flags += f" --log_samples --output_path {tmp_path}/out"
    offline = environment(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path))
    subprocess.run([sys.executable, "-m", "lm_eval", *flags.split()], env=offline, check=True)
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    records = map(json.loads, samples.read_text().splitlines())
    theirs = {record["doc_id"]: record for record in records}
    losses = score(GPT.from_pretrained(checkpoint), examples, "cpu")
    for n, (ours, example) in enumerate(zip(losses, examples, strict=True)):
        loglikelihoods = [float(response[0]) for response in theirs[n]["filtered_resps"]]
        np.testing.assert_allclose(-ours, loglikelihoods, atol=1e-3)
        assert theirs[n]["acc"] == float(ours.argmin() == example["label"])
