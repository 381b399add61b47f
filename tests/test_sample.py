"""Generation is what the plain loop gives, and sample.py on top of it."""

import io
import json
import math
import os
import pty
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from conftest import EOT, random_model
from contract import TOLD

import sample
from model import GPT, GPTConfig
from support.base.errors import UsageError, UserError
from support.text.tokenizer import gpt2, train_vocabulary
from support.weights import generation
from support.weights.generation import choose, compile_step, pad


def uncached(model: GPT, prompts: list[list[int]], n: int, **how) -> list[list[int]]:
    """The rule, written plainly: for each token, each row's whole context is read again.

    At the window's end, only the newest half of it is kept.
    """
    rows = [list(prompt) for prompt in prompts]
    start = [0] * len(prompts)
    window = model.config.block_size
    for _ in range(n):
        logits = []
        for i, row in enumerate(rows):
            if len(row) - start[i] > window:
                start[i] = len(row) - max(1, window // 2)
            with torch.no_grad():
                logits.append(model(torch.tensor([row[start[i] :]]))[0][:, -1])
        for row, token in zip(rows, choose(torch.cat(logits), **how).tolist(), strict=True):
            row.append(token)
    return rows


@pytest.mark.parametrize("sampled", [False, True])
# the window holds 24
@pytest.mark.parametrize("lengths", [[1], [24], [30], [5, 5, 5, 5], [3, 30, 11, 1]])
def test_cached_generation_is_uncached_generation_across_the_windows_end(lengths, sampled):
    model = random_model()
    n = 60
    idx = torch.randint(0, 50257, (len(lengths), max(lengths)))
    prompts = [row[:length] for row, length in zip(idx.tolist(), lengths, strict=True)]
    how = dict(temperature=0.8, top_k=20, top_p=0.9) if sampled else dict(temperature=0)
    expected = uncached(model, prompts, n, generator=torch.Generator().manual_seed(5), **how)
    generator = torch.Generator().manual_seed(5)
    out = model.generate(idx, n, lengths=lengths, generator=generator, **how).tolist()
    assert [row[: length + n] for row, length in zip(out, lengths, strict=True)] == expected
    assert all(set(row[length + n :]) <= {EOT} for row, length in zip(out, lengths, strict=True))


@pytest.mark.parametrize("window", [1, 2])
def test_the_smallest_windows_generate_what_the_plain_rule_gives(window):
    model = random_model(block_size=window)
    prompts = [[5], [6, 7, 8]]
    steps = model.stream(pad(prompts), 9, lengths=[1, 3], temperature=0)
    tokens = torch.stack(list(steps), 1).tolist()
    expected = uncached(model, prompts, 9, temperature=0)
    assert [[*row, *new] for row, new in zip(prompts, tokens, strict=True)] == expected


# the vocabulary's last token, <|endoftext|> in GPT-2's, fills rows up
@pytest.mark.parametrize("vocab_size", [50257, 300])
def test_prompts_of_different_lengths_share_a_batch_without_disturbing_each_other(vocab_size):
    model = random_model(vocab_size=vocab_size)
    n = 50
    lengths = [3, 20, 11, 1]
    idx = torch.randint(0, vocab_size, (4, 20))
    out = model.generate(idx, n, lengths=torch.tensor(lengths), temperature=0)
    assert out.shape == (4, 20 + n)
    for row, length in enumerate(lengths):
        alone = model.generate(idx[row : row + 1, :length], n, temperature=0)[0]
        assert torch.equal(out[row, : length + n], alone)
        assert (out[row, length + n :] == vocab_size - 1).all()


def test_generation_stops_where_it_is_told():
    model = random_model()
    idx = torch.randint(0, 50257, (2, 4))
    free = model.generate(idx, 20, temperature=0)
    stop = free[0, 8].item()
    out = model.generate(idx, 20, temperature=0, stop=stop)
    first = free[0, 4:].tolist().index(stop)
    assert out[0, 4 : 5 + first].tolist() == free[0, 4 : 5 + first].tolist()
    assert (out[0, 5 + first :] == stop).all()


def test_a_seed_gives_the_same_samples_and_leaves_the_global_generator_alone(tiny):
    idx = torch.zeros(2, 3, dtype=torch.int64)
    before = torch.get_rng_state()
    a, b = (tiny.generate(idx, 10, generator=torch.Generator().manual_seed(s)) for s in (1, 1))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(a, tiny.generate(idx, 10, generator=torch.Generator().manual_seed(2)))


def test_top_k_and_top_p_only_draw_from_the_likeliest():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(2000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = {k: set(choose(logits, 1.0, k, None, generator).tolist()) for k in (1, 2, 4, None)}
    assert drawn == {1: {0}, 2: {0, 1}, 4: {0, 1, 2, 3}, None: {0, 1, 2, 3}}
    nucleus = {p: set(choose(logits, 1.0, None, p, generator).tolist()) for p in (0.1, 0.6, 0.9)}
    assert nucleus == {0.1: {0}, 0.6: {0, 1}, 0.9: {0, 1, 2}}
    share = (choose(logits, 1.0, None, None, generator) == 0).float().mean().item()
    assert abs(share - 0.5) < 0.05
    for temperature in (0, 1e-300, 1e-46, 1e-31):  # the likeliest
        assert (choose(logits.float(), temperature) == 0).all()


def test_top_p_takes_no_token_more_than_it_needs():
    exact = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).expand(2000, 4)
    taken = {p: set(choose(exact, top_k=None, top_p=p).tolist()) for p in (0.0, 0.5, 0.75, 1.0)}
    assert taken == {0.0: {0}, 0.5: {0}, 0.75: {0, 1}, 1.0: {0, 1, 2, 3}}


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(lengths=[0, 3]), r"prompt \[\]: give at least one token"),
        (dict(lengths=[2, 4]), r"lengths \[2, 4\]: idx has 3 columns"),
        (dict(lengths=torch.tensor([2, -1])), r"lengths \[2, -1\]"),
        (dict(idx=torch.zeros(2, 0, dtype=torch.int64)), "give at least one token"),
        (dict(idx=torch.tensor([[50257]])), r"prompt \[50257\].* from 0 to 50256"),
        (dict(temperature=-1), "temperature -1"),
        (dict(temperature=math.nan), "temperature nan"),
        (dict(top_k=-1), "top_k -1"),
        (dict(top_p=1.5), "top_p 1.5"),
    ],
)
def test_what_means_nothing_generates_nothing(tiny, options, sentence, outcome):
    idx = options.pop("idx", torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(UserError, match=sentence):
        tiny.generate(idx, 4, **options)
    outcome("sampling and scoring", sentence, TOLD)


def test_no_prompts_are_no_samples(tiny):
    idx = torch.zeros(0, 3, dtype=torch.long)
    assert torch.equal(tiny.generate(idx, 4), idx)


def test_no_new_tokens_are_the_prompts(tiny):
    idx = torch.tensor([[5, 6, 7], [8, 9, 1]])
    assert tiny.generate(idx, 0, lengths=[3, 2]).tolist() == [[5, 6, 7], [8, 9, EOT]]


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_spoiled_weights_give_a_sentence_and_no_tokens(tiny, spoiled):
    with torch.no_grad():
        tiny.transformer.ln_f.weight[3] = spoiled
    with pytest.raises(UserError, match="logits are infinite or NaN"):
        tiny.generate(torch.zeros(1, 3, dtype=torch.int64), 4)


def test_a_compiled_step_gives_the_same_tokens_and_compiles_once(monkeypatch):
    from torch._dynamo.utils import counters

    model = random_model()
    idx = torch.randint(0, 50257, (3, 6))
    lengths = [6, 2, 4]
    how = dict(lengths=lengths, temperature=0)
    eager = model.generate(idx, 40, **how)  # across the window's end
    quick = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", quick)
    counters.clear()
    compile_step(model)
    for _ in range(2):
        assert torch.equal(model.generate(idx, 40, **how), eager)
    assert counters["stats"]["unique_graphs"] == 1
    long = random_model(block_size=512)
    counters.clear()
    compile_step(long)
    for n in range(1, 12):  # more lengths than dynamo would compile
        long.generate(idx[:, :n], 3)
    assert counters["stats"]["unique_graphs"] == 1


# -- sample.py


@pytest.fixture
def directory(tmp_path, tiny):
    tiny.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(monkeypatch, capsys, *args, stdin: bytes = b"") -> str:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    sample.main([*map(str, args), "--device", "cpu", "--dtype", "float32"])
    return capsys.readouterr().out


def test_a_streamed_sample_is_the_text_of_its_tokens(monkeypatch, capsys, directory):
    flags = f"--model {directory} --max-new-tokens 12 --temperature 0".split()
    out = run(monkeypatch, capsys, *flags, "--prompt", "Hello 🌍")
    prompt = gpt2().encoding.encode_ordinary("Hello 🌍")
    model = GPT.from_pretrained(directory)
    tokens = model.generate(torch.tensor([prompt]), 12, temperature=0)[0].tolist()
    assert out == gpt2().encoding.decode(tokens) + "\n"


def test_prompts_from_stdin_and_a_file_share_a_batch_and_come_as_json(
    monkeypatch, capsys, directory, tmp_path
):
    prompts = ["Hello", "One two three four", "Żółw"]
    flags = f"--model {directory} --max-new-tokens 5 --temperature 0".split()
    alone = [run(monkeypatch, capsys, *flags, "--prompt", prompt) for prompt in prompts]
    text = "\n".join([*prompts, ""])
    out = run(monkeypatch, capsys, *flags, "--prompt", "-", "--json", stdin=text.encode())
    samples = [json.loads(line) for line in out.splitlines()]
    assert [sample["prompt"] for sample in samples] == prompts
    assert [sample["prompt"] + sample["text"] + "\n" for sample in samples] == alone
    source = tmp_path / "prompts.txt"
    source.write_text(text, encoding="utf-8")
    out = run(monkeypatch, capsys, *flags, "--prompt", f"@{source}", "--num-samples", 2)
    twice = [one for one in alone for _ in range(2)]
    assert out == "".join(f"--- sample {i}\n{one}" for i, one in enumerate(twice))


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (
            "one\u2028still one\x0cand\x85so\ron\ntwo",
            ["one\u2028still one\x0cand\x85so\ron", "two"],
        ),
        ("one\n\nthree\n", ["one", "", "three"]),
        ("one\r\n\r\nthree\r\n", ["one", "", "three"]),
        ("\n", [""]),
        ("\ufeffone\n\ufefftwo", ["one", "\ufefftwo"]),  # only a file begins with a byte order mark
    ],
)
def test_each_line_is_a_prompt_and_only_a_line_feed_ends_it(tmp_path, content, prompts):
    for encoding in ("utf-8", "utf-16"):  # as Windows' PowerShell writes it
        (tmp_path / "prompts").write_bytes(content.removeprefix("\ufeff").encode(encoding))
        assert sample.read_prompts(f"@{tmp_path}/prompts") == prompts
    (tmp_path / "prompts").write_bytes(content.encode())
    assert sample.read_prompts(f"@{tmp_path}/prompts") == prompts


def test_without_a_prompt_the_newest_run_continues_its_own_five_times(
    monkeypatch, capsys, tiny, tmp_path
):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(GPT, "from_pretrained", lambda name: asked.append(name) or tiny)
    monkeypatch.setattr(sample, "stream_texts", lambda *a, **_: asked.append(a[1:]) or [])
    sample.main(["--device", "cpu"])
    assert "make quickstart trains one" in capsys.readouterr().err
    assert asked == ["gpt2", (5 * [sample.PROMPT], 32)]
    for i, name in enumerate(("older", "newer", "damaged_by_someone")):
        folder = tmp_path / "log" / name
        tiny.save_pretrained(folder / ("ckpt_000002" if i < 2 else "damaged_ckpt_000002"))
        starts = [("run", "before"), ("resume", f"@I am {name}")]
        own = [dict(sample_prompt=text, sample_tokens=64) for _, text in starts]
        records = [dict(type=kind, config=c) for (kind, _), c in zip(starts, own, strict=True)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "log" / "newer" / "output.txt").touch()  # what it printed
    os.utime(tmp_path / "log" / "older" / "ckpt_000002", (0, 0))
    asked.clear()
    run(monkeypatch, capsys)
    run(monkeypatch, capsys, "--model", "log/older/ckpt_000002", "--num-samples", 2)
    run(monkeypatch, capsys, "--prompt", "Hello", "--num-samples", 2)
    run(monkeypatch, capsys, "--temperature", 0)
    assert asked == [
        "log/newer/ckpt_000002", (5 * ["@I am newer"], 64),
        "log/older/ckpt_000002", (2 * ["@I am older"], 64),
        "log/newer/ckpt_000002", (2 * ["Hello"], 100),
        "log/newer/ckpt_000002", (["@I am newer"], 64),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, shown",
    [
        (" who\nis it that\ncannot spe", " who\nis it that"),
        (" a line\n", " a line"),
        (" no line at al", " no line at"),
        ("\nROM", "\nROM"),
        ("word", "word"),
    ],
)
def test_without_a_prompt_samples_end_at_a_line_unless_their_length_is_typed(
    text, shown, monkeypatch, capsys, tiny, tmp_path
):
    monkeypatch.chdir(tmp_path)  # where nothing was trained
    monkeypatch.setattr(GPT, "from_pretrained", lambda _: tiny)
    monkeypatch.setattr(sample, "stream_texts", lambda *a, **_: iter([a[1], [text] * len(a[1])]))
    written = run(monkeypatch, capsys, "--temperature", 0)
    assert written == f"--- sample 0\n{sample.PROMPT}{shown}\n"
    assert text in run(monkeypatch, capsys, "--temperature", 0, "--max-new-tokens", 9)


def test_a_prompt_that_outgrows_the_window_is_told_once(tiny, capsys):
    for n, told in ((32, False), (33, True), (33, False)):  # of 32 tokens
        list(generation.stream_texts(tiny, ["a" + " a" * (n - 1)], 1))
        said = "of a prompt of 33 tokens, the model sees the last 16"
        assert (said in capsys.readouterr().err) == told


def test_an_end_that_is_typed_in_a_prompt_is_told_to_be_letters(tiny, capsys):
    for prompt, told in (("a", False), ("a<|endoftext|>b", True)):
        list(generation.stream_texts(tiny, [prompt], 1))
        assert ("<|endoftext|> in a prompt is read as letters" in capsys.readouterr().err) == told


def test_a_terminal_is_asked_for_prompts_until_ctrl_d(monkeypatch, capsys, directory):
    flags = f"--model {directory} --max-new-tokens 5 --temperature 0".split()
    alone = [run(monkeypatch, capsys, *flags, "--prompt", prompt) for prompt in ("Hello", "One")]
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"Hello\nOne\n\4")
    with open(terminal, closefd=False) as stdin, open(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        sample.main([*flags, "--interactive", "--device", "cpu"])
    shown = b""
    with suppress(OSError):  # how a closed terminal ends on Linux
        while piece := os.read(keyboard, 10**6):
            shown += piece
    assert (
        shown.decode()
        .replace("\r\n", "\n")
        .endswith("Ctrl-D ends.\n> " + "> ".join(alone) + "> \n")
    )


def test_samples_are_drawn_together_and_leave_the_model_and_the_random_state_alone(tiny):
    tiny.train()
    state = torch.get_rng_state()
    texts = generation.complete(tiny, "def ", 3, 8, generator=torch.Generator().manual_seed(1))
    assert len(set(texts)) == 3 and all(text.startswith("def ") for text in texts)
    assert tiny.training and torch.equal(torch.get_rng_state(), state)


def test_a_sample_has_the_models_own_vocabulary_and_ends_at_its_end_of_text():
    vocabulary = train_vocabulary(["héllo " * 9], 270)
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8, vocab_size=270))
    model.tokenizer = vocabulary
    made = [*vocabulary.encode(" é!"), vocabulary.eot, vocabulary.eot]
    choose = iter(torch.tensor([[token] for token in [*made, 0]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "choose", lambda *_, **__: next(choose))
        assert generation.complete(model, "", 1, 9) == [" é!"]
        assert next(choose) == vocabulary.eot, "nothing is made behind the first one"


@pytest.mark.parametrize(
    ("args", "stdin", "sentence"),
    [
        (["--num-samples", "-1", "--top-p", 1.5], b"", "samples -1: .*top-p 1.5: .*at most 1"),
        (["--num-samples", 10**20], b"", f"--num-samples {10**20}: "),
        (["--max-new-tokens", "-1"], b"", "--max-new-tokens -1: .*at least 0"),
        (["--interactive", "--prompt", "a"], b"", "--interactive asks for prompts"),
        (["--temperature", "nan"], b"", "--temperature nan: .*at least 0"),
        (["--temperature", "-1"], b"", "--temperature -1.0: .*at least 0"),
        (["--top-k", "-1"], b"", "--top-k -1: .*at least 0"),
        (["--prompt", "-"], b"", "--prompt - has no prompts"),
        (["--prompt", "@/nowhere/prompts"], b"", "No such file .*/nowhere/prompts"),
    ],
)
def test_a_mistake_is_a_sentence(monkeypatch, capsys, directory, args, stdin, sentence):
    with pytest.raises(UserError, match=sentence):
        run(monkeypatch, capsys, "--model", directory, *args, stdin=stdin)


def test_a_vocabulary_that_is_not_gpt2s_is_refused(monkeypatch, capsys, tmp_path):
    model = GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8, vocab_size=65))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has 65 tokens, its tokenizer 50257"):
        run(monkeypatch, capsys, "--model", tmp_path)


def test_extreme_values_that_mean_something_are_taken(monkeypatch, capsys, directory):
    flags = f"--model {directory} --max-new-tokens 5 --num-samples 2".split()
    greedy = run(monkeypatch, capsys, *flags, "--temperature", 0)
    extremes = f"--temperature 1e-300 --top-k {10**12} --seed {10**30}".split()
    assert run(monkeypatch, capsys, *flags, *extremes) == greedy
    assert run(monkeypatch, capsys, *flags, "--top-p", 0, "--seed", "-1") == greedy
    run(monkeypatch, capsys, *flags, "--temperature", 1e12)


def test_many_samples_are_made_some_at_a_time(monkeypatch, capsys, directory):
    sizes = []

    def stream_texts(model, prompts, *_, **__):
        sizes.append(len(prompts))
        yield [""] * len(prompts)

    monkeypatch.setattr(sample, "stream_texts", stream_texts)
    out = run(monkeypatch, capsys, "--model", directory, "--num-samples", 150)
    assert sizes == [64, 64, 22]
    assert "--- sample 149\n" in out


def test_bytes_on_the_command_line_that_are_no_text_are_shown_as_the_model_reads_them(tiny):
    (prompt,) = sample.read_prompts("caf\udce9")
    assert prompt == "caf\ufffd"
    (text,) = generation.complete(tiny, "caf\udce9", 1, 3, temperature=0)
    assert text.startswith(prompt) and text.encode()


def test_a_compiler_that_does_not_work_is_a_sentence(monkeypatch, capsys, directory):
    monkeypatch.setattr(sample, "why_not_compile", lambda device: "no compiler here")
    with pytest.raises(UsageError, match="--compile: no compiler here; leave that flag out"):
        run(monkeypatch, capsys, "--model", directory, "--compile")
