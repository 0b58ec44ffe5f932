"""The model on the reference backend: every way to run a sequence gives what the plainest way gives."""

import pytest
import torch

from flintc.errors import CapacityError, TokenizerError, UsageError, VerificationError
from flintc.runtime.generation import GenerationDefaults
from flintc.runtime.sampling import SamplingParams

GENERATOR = torch.Generator().manual_seed(1)
PROMPT = torch.randint(0, 256, (60,), generator=GENERATOR).tolist()
#: Around the window of 13, pages of 8, rings of whole pages and the reference's slices.
LENGTHS = [1, 2, 7, 8, 9, 12, 13, 14, 15, 24, 25, 60]


def prompts(*lengths):
    return [torch.randint(0, 256, (n,), generator=GENERATOR).tolist() for n in lengths]


@pytest.mark.parametrize("length", LENGTHS)
def test_generation_equals_recomputing_everything_per_token(make_model, length):
    model = make_model(tokenizer=False)
    got = model.generate(PROMPT[:length], max_tokens=20, temperature=0.0).token_ids
    ids = list(PROMPT[:length])
    for token in got:
        assert token == model.forward(ids)[-1].argmax().item()
        ids.append(token)


@pytest.mark.parametrize("rows", [1, 3, 12, 13, 50])
def test_slices_do_not_change_the_logits(make_model, rows):
    model = make_model()
    ids = prompts(200)[0]
    whole = model.forward(ids)
    model.executor.rows = rows
    sliced = model.forward(ids)
    assert whole.shape == (200, 512)
    assert whole.dtype == torch.float32
    assert torch.allclose(whole, sliced, atol=1e-4, rtol=0)


@pytest.mark.parametrize("numerics", ["rounded", "fp32"])
def test_a_batch_gives_each_request_what_it_gets_alone(make_model, numerics):
    batch = prompts(3, 40, 13, 1, 130, 12, 77, 14, 5, 60)  # more requests than slots
    options = [
        {"temperature": 0.0, "max_tokens": 9}, {"seed": 1, "max_tokens": 30}, {"seed": 2, "max_tokens": 1},
        {"seed": 3, "top_k": 0, "top_p": 1.0, "max_tokens": 17}, {"seed": 4, "temperature": 0.3, "max_tokens": 20},
        *({"seed": i, "max_tokens": 12} for i in range(5)),
    ]  # fmt: skip
    model = make_model(numerics)
    together = model.generate_batch(batch, options)
    for prompt, own, got in zip(batch, options, together, strict=True):
        assert got == make_model(numerics).generate(prompt, **own)
        assert len(got.token_ids) == own["max_tokens"]


def test_requests_wait_for_pages(make_model):
    roomy, tight = make_model(), make_model(pages=10, slots=8)
    batch = prompts(30, 30, 30, 30)
    options = {"temperature": 0.0, "max_tokens": 20}  # 50 tokens need 7 pages of 8: one request at a time
    assert tight.generate_batch(batch, **options) == roomy.generate_batch(batch, **options)
    with pytest.raises(CapacityError, match="need 13 KV pages"):
        tight.generate(prompts(90)[0], max_tokens=10)
    assert tight.executor.kv.fits(80)


def test_stream_gives_the_tokens_and_text_of_generate(make_model):
    model = make_model()
    whole = model.generate(PROMPT, max_tokens=40, seed=9)
    pieces = list(model.stream(PROMPT, max_tokens=40, seed=9))
    assert tuple(p.id for p in pieces) == whole.token_ids
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
    assert tuple(p.logprob for p in pieces) == whole.logprobs


def test_an_abandoned_stream_gives_its_slot_back(make_model):
    model = make_model(slots=1)
    stream = model.stream(PROMPT, max_tokens=40)
    next(stream)
    with pytest.raises(CapacityError, match="all 1 sequence slots"):
        model.forward(PROMPT)
    stream.close()
    model.forward(PROMPT)


def test_stop_ids_end_the_text(make_model):
    model = make_model()
    free = model.generate(PROMPT, max_tokens=20, temperature=0.0, stop_ids=())
    assert free.finish_reason == "length"
    at = next(i for i, t in enumerate(free.token_ids) if t not in free.token_ids[:i] and i >= 3)
    stop = free.token_ids[at]
    for stopping in (
        model.generate(PROMPT, max_tokens=20, temperature=0.0, stop_ids=[stop, 511]),
        make_model(defaults=GenerationDefaults(stop_ids=frozenset([stop]))).generate(
            PROMPT, max_tokens=20, temperature=0.0
        ),
    ):
        assert stopping.finish_reason == "stop"
        assert stopping.token_ids == free.token_ids[: at + 1]
        assert stopping.text == model.tokenizer.decode(free.token_ids[:at])
    streamed = list(model.stream(PROMPT, max_tokens=20, temperature=0.0, stop_ids=[stop]))
    assert "".join(p.text for p in streamed) == model.tokenizer.decode(free.token_ids[:at])


def test_ids_without_text_are_sampled_only_without_a_tokenizer(make_model):
    flat = {"temperature": 50.0, "top_k": 0, "top_p": 1.0, "max_tokens": 150, "seed": 0, "stop_ids": ()}
    known = make_model()
    assert max(known.generate(PROMPT, **flat).token_ids) < known.tokenizer.count
    unknown = make_model(tokenizer=False)
    result = unknown.generate(PROMPT, **flat)
    assert max(result.token_ids) >= known.tokenizer.count
    assert result.text is None
    with pytest.raises(TokenizerError, match="no tokenizer here"):
        unknown.generate("text")
    with pytest.raises(TokenizerError, match="no tokenizer here"):
        unknown.chat([{"role": "user", "content": "text"}])


def test_text_prompts(make_model):
    model = make_model()
    ids = model.tokenizer.encode("Grüße")
    assert model.generate("Grüße", max_tokens=5, seed=1) == model.generate(ids, max_tokens=5, seed=1)
    assert model.generate("Grüße", max_tokens=5).prompt_tokens == len(ids) == 7


def test_a_tokenizer_larger_than_the_model_is_no_tokenizer(make_model, demo_backend):
    from flintc.runtime.model import Model
    from flintc.runtime.tokenizer import Tokenizer

    model = Model(make_model().executor, 100, Tokenizer(demo_backend))
    assert model.sampled_vocab is None
    with pytest.raises(TokenizerError, match="269 ids, the model 100"):
        model.generate("text")


def test_a_drawn_seed_is_reported_and_repeats(make_model):
    model = make_model()
    first = model.generate(PROMPT, max_tokens=25)
    again = model.generate(PROMPT, max_tokens=25, seed=first.seed)
    assert again == first
    assert model.generate(PROMPT, max_tokens=25).seed != first.seed


def test_logprobs_are_those_of_the_forward_pass(make_model):
    model = make_model(tokenizer=False)
    got = model.generate(PROMPT, max_tokens=10, seed=4)
    expected = torch.log_softmax(model.forward([*PROMPT, *got.token_ids]), 1)
    for i, (token, logprob) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
        assert logprob == pytest.approx(expected[len(PROMPT) - 1 + i, token].item(), abs=1e-4)


def test_logprobs_of_padding_ids_are_those_of_what_is_never_sampled(make_model):
    model = make_model()
    padding = model.sampled_vocab
    assert padding < model.vocab
    ids = [*PROMPT[:5], padding, *PROMPT[5:9]]
    got, logits = model.logprobs(ids), model.forward(ids)[:, :padding]
    assert got[4] == float("-inf")
    rest = [i for i in range(len(ids) - 1) if i != 4]
    expected = torch.log_softmax(logits, 1)[rest, [ids[i + 1] for i in rest]]
    torch.testing.assert_close(got[rest], expected)


def test_the_context_is_exactly_usable(make_model):
    model = make_model(context=64)
    full = model.generate(PROMPT, max_tokens=4, temperature=0.0, stop_ids=())
    assert len(full.token_ids) == 4
    assert model.forward(PROMPT + PROMPT[:4]).shape[0] == 64
    unlimited = model.generate(PROMPT, temperature=0.0, stop_ids=())
    assert unlimited.token_ids == full.token_ids
    assert unlimited.finish_reason == "length"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.generate(PROMPT, max_tokens=5), CapacityError, "60 prompt tokens and 5 .* limit of 64"),
        (lambda m: m.stream(PROMPT, max_tokens=5), CapacityError, "limit of 64"),
        (lambda m: m.generate(PROMPT + PROMPT), CapacityError, "120 prompt tokens and 1 .* limit of 64"),
        (lambda m: m.forward(PROMPT + PROMPT), CapacityError, "120 tokens .* context limit is 64"),
        (lambda m: m.forward([]), UsageError, "empty"),
        (lambda m: m.generate(""), UsageError, "empty"),
        (lambda m: m.forward([1, 512]), UsageError, "512 is outside the vocabulary of 512"),
        (lambda m: m.forward([-1]), UsageError, "-1 is outside"),
        (lambda m: m.forward([1.5]), UsageError, "whole numbers"),
        (lambda m: m.forward(torch.zeros(1, 4, dtype=torch.long)), UsageError, "whole numbers"),
        (lambda m: m.generate(PROMPT, max_tokens=0), UsageError, "max_tokens is 0"),
        (lambda m: m.generate(PROMPT, temperature=-1.0), UsageError, "temperature"),
        (lambda m: m.generate_batch([PROMPT, PROMPT], [{}]), UsageError, "2 prompts but options for 1"),
    ],
)
def test_impossible_requests(make_model, call, error, words):
    model = make_model(context=64)
    with pytest.raises(error, match=words):
        call(model)
    assert model.executor.kv.fits(64)


def test_defaults_apply_and_options_win(make_model):
    greedy = GenerationDefaults(SamplingParams(temperature=0.0))
    model = make_model(defaults=greedy)
    assert model.generate(PROMPT, max_tokens=8).token_ids == make_model().generate(
        PROMPT, max_tokens=8, temperature=0.0
    ).token_ids  # fmt: skip
    assert model.generate(PROMPT, max_tokens=30, temperature=2.0, seed=1).token_ids != model.generate(
        PROMPT, max_tokens=30
    ).token_ids  # fmt: skip


def test_damaged_weights_show_as_an_error(make_model, tiny):
    weights = dict(tiny[2])
    weights["L3.w.qkv"] = torch.full_like(weights["L3.w.qkv"], float("nan"))
    model = make_model(weights=weights)
    with pytest.raises(VerificationError, match="logits of position 59"):
        model.generate(PROMPT, max_tokens=3)
    assert model.executor.kv.fits(512)


def test_path_names_backend_and_numerics(make_model):
    assert make_model("rounded").generate(PROMPT, max_tokens=1).path == "reference"
    assert make_model("fp32").generate(PROMPT, max_tokens=1).path == "reference-fp32"
