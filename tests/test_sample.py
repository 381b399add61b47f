"""Generation is what the plain loop gives, and sample.py on top of it."""

import io
import json
import sys

import pytest
import torch
from conftest import random_model

import sample
from model import GPT, GPTConfig, choose
from tokenizer import EOT, UserError, get_tokenizer


def uncached(model: GPT, prompts: list[list[int]], n: int, **how) -> list[list[int]]:
    """The rule, written plainly: each row's whole context again for each token; the newest half of it at the window's end."""
    rows, start, window = [list(prompt) for prompt in prompts], [0] * len(prompts), model.config.block_size
    for _ in range(n):
        start = [len(row) - window // 2 if len(row) - s > window else s for row, s in zip(rows, start, strict=True)]
        with torch.no_grad():
            logits = [model(torch.tensor([row[s:]]))[0][:, -1] for row, s in zip(rows, start, strict=True)]
        for row, token in zip(rows, choose(torch.cat(logits), **how).tolist(), strict=True):
            row.append(token)
    return rows


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("lengths", [[1], [24], [30], [5, 5, 5, 5], [3, 30, 11, 1]])  # the window holds 24
def test_cached_generation_is_uncached_generation_across_the_windows_end(lengths, sampled):
    model, n = random_model(), 60
    idx = torch.randint(0, 50257, (len(lengths), max(lengths)))
    prompts = [row[:length] for row, length in zip(idx.tolist(), lengths, strict=True)]
    how = dict(temperature=0.8, top_k=20, top_p=0.9) if sampled else dict(temperature=0)
    expected = uncached(model, prompts, n, generator=torch.Generator().manual_seed(5), **how)
    out = model.generate(idx, n, lengths=lengths, generator=torch.Generator().manual_seed(5), **how).tolist()
    assert [row[: length + n] for row, length in zip(out, lengths, strict=True)] == expected
    assert all(set(row[length + n :]) <= {EOT} for row, length in zip(out, lengths, strict=True))


def test_prompts_of_different_lengths_share_a_batch_without_disturbing_each_other():
    model, n = random_model(), 50
    lengths = [3, 20, 11, 1]
    idx = torch.randint(0, 50257, (4, 20))
    out = model.generate(idx, n, lengths=torch.tensor(lengths), temperature=0)
    assert out.shape == (4, 20 + n)
    for row, length in enumerate(lengths):
        alone = model.generate(idx[row : row + 1, :length], n, temperature=0)[0]
        assert torch.equal(out[row, : length + n], alone) and (out[row, length + n :] == EOT).all()


def test_generation_stops_where_it_is_told():
    model = random_model()
    idx = torch.randint(0, 50257, (2, 4))
    free = model.generate(idx, 20, temperature=0)
    stop = free[0, 8].item()
    out = model.generate(idx, 20, temperature=0, stop=stop)
    first = free[0, 4:].tolist().index(stop)
    assert out[0, 4 : 5 + first].tolist() == free[0, 4 : 5 + first].tolist() and (out[0, 5 + first :] == stop).all()


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
    assert (choose(logits, 0, 50, None) == 0).all()


@pytest.mark.parametrize("lengths", [[0, 3], [4, 1]])
def test_impossible_prompt_lengths_are_refused(tiny, lengths):
    with pytest.raises(UserError, match="every prompt needs"):
        tiny.generate(torch.zeros(2, 3, dtype=torch.int64), 4, lengths=lengths)


def test_a_compiled_step_gives_the_same_tokens_and_compiles_once(monkeypatch):
    from torch._dynamo.utils import counters

    model = random_model()
    idx, lengths = torch.randint(0, 50257, (3, 6)), [6, 2, 4]
    eager = model.generate(idx, 40, lengths=lengths, temperature=0)  # across the window's end
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options))
    counters.clear()
    for _ in range(2):
        assert torch.equal(model.generate(idx, 40, lengths=lengths, temperature=0, compile=True), eager)
    assert counters["stats"]["unique_graphs"] == 1


# -- sample.py


@pytest.fixture
def directory(tmp_path, tiny):
    tiny.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(monkeypatch, capsys, *args, stdin: bytes = b"") -> str:
    monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, args), "--device", "cpu", "--dtype", "float32"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    sample.main()
    return capsys.readouterr().out


def test_a_streamed_sample_is_the_text_of_its_tokens(monkeypatch, capsys, directory):
    out = run(monkeypatch, capsys, "--model", directory, "--prompt", "Hello 🌍", "--max-new-tokens", 12, "--temperature", 0)
    prompt = get_tokenizer().encode_ordinary("Hello 🌍")
    tokens = GPT.from_pretrained(directory).generate(torch.tensor([prompt]), 12, temperature=0)[0].tolist()
    assert out == get_tokenizer().decode(tokens) + "\n"


def test_prompts_from_stdin_and_a_file_share_a_batch_and_come_as_json(monkeypatch, capsys, directory, tmp_path):
    prompts = ["Hello", "One two three four", "Żółw"]
    args = ("--model", directory, "--max-new-tokens", 5, "--temperature", 0)
    alone = [run(monkeypatch, capsys, *args, "--prompt", prompt) for prompt in prompts]
    text = "\n".join([*prompts, ""])
    lines = run(monkeypatch, capsys, *args, "--prompt", "-", "--json", stdin=text.encode()).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    assert [json.loads(line)["prompt"] + json.loads(line)["text"] + "\n" for line in lines] == alone
    (tmp_path / "prompts.txt").write_text(text, encoding="utf-8")
    out = run(monkeypatch, capsys, *args, "--prompt", f"@{tmp_path / 'prompts.txt'}", "--num-samples", 2)
    assert out == "".join(f"--- sample {2 * i + j}\n{one}" for i, one in enumerate(alone) for j in range(2))


def test_samples_are_drawn_together_and_leave_the_model_and_the_random_state_alone(tiny):
    tiny.train()
    state = torch.get_rng_state()
    texts = sample.complete(tiny, "def ", 3, 8, generator=torch.Generator().manual_seed(1))
    assert len(set(texts)) == 3 and all(text.startswith("def ") for text in texts)
    assert tiny.training and torch.equal(torch.get_rng_state(), state)


def test_a_sample_ends_at_the_first_stop_and_does_not_show_it(tiny):
    tokens = tiny.eval().generate(torch.tensor([[EOT]]), 6, temperature=0)[0].tolist()
    (text,) = sample.complete(tiny, "", 1, 6, temperature=0, stop=tokens[3])
    assert text == get_tokenizer().decode(tokens[1 : tokens.index(tokens[3], 1)])


@pytest.mark.parametrize(
    ("args", "stdin", "sentence"),
    [
        (["--num-samples", 0, "--top-p", 0], b"", "--num-samples 0: at least 1; --top-p 0.0: above 0"),
        (["--prompt", "-"], b"\n", "no line to continue"),
    ],
)
def test_a_mistake_is_a_sentence(monkeypatch, capsys, directory, args, stdin, sentence):
    with pytest.raises(UserError, match=sentence):
        run(monkeypatch, capsys, "--model", directory, *args, stdin=stdin)


def test_a_vocabulary_that_is_not_gpt2s_is_refused(tmp_path):
    GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8, vocab_size=65)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a vocabulary of 65"):
        sample.load(str(tmp_path), torch.device("cpu"), torch.float32)
