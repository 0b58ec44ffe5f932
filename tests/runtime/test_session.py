"""Prefixes kept in the cache: the tokens are those of a fresh start, and a ring that lost its window is noticed."""

import pytest
import torch

from flintc.errors import CapacityError, UsageError

IDS = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(2)).tolist()
GREEDY = {"temperature": 0.0, "stop_ids": ()}


def fresh(make_model, prompt, count):
    return make_model(tokenizer=False).generate(prompt, max_tokens=count, **GREEDY).token_ids


def test_a_longer_prompt_continues_the_cached_start(make_model):
    with make_model(tokenizer=False).session() as session:
        first = session.generate(IDS[:40], max_tokens=10, **GREEDY)
        prompt = [*IDS[:40], *first.token_ids, *IDS[100:120]]
        second = session.generate(prompt, max_tokens=10, **GREEDY)
        assert (first.reused, second.reused) == (0, 49)  # the last token made was never processed
        assert second.token_ids == fresh(make_model, prompt, 10)


@pytest.mark.parametrize("cut", [1, 11, 12, 13, 14, 30, 39])
def test_a_prompt_that_departs_earlier(make_model, cut):
    with make_model(tokenizer=False).session() as session:
        session.generate(IDS[:40], max_tokens=10, **GREEDY)
        prompt = [*IDS[:cut], (IDS[cut] + 1) % 256, *IDS[200:220]]
        got = session.generate(prompt, max_tokens=10, **GREEDY)
        assert got.reused == cut  # the reference's rings hold 128 rows beside the window
        assert got.token_ids == fresh(make_model, prompt, 10)


def test_a_cut_behind_the_ring_is_computed_again(make_model):
    with make_model(tokenizer=False).session() as session:
        session.generate(IDS, max_tokens=10, **GREEDY)
        for cut, reused in ((290, 290), (170, 0)):
            prompt = [*IDS[:cut], (IDS[cut] + 1) % 256]
            got = session.generate(prompt, max_tokens=10, **GREEDY)
            assert got.reused == reused
            assert got.token_ids == fresh(make_model, prompt, 10)


def test_the_same_prompt_again(make_model):
    with make_model(tokenizer=False).session() as session:
        first = session.generate(IDS[:50], max_tokens=5, **GREEDY)
        second = session.generate(IDS[:50], max_tokens=5, **GREEDY)
        assert second.reused == 49
        assert second.token_ids == first.token_ids


def test_a_failed_call_leaves_a_usable_session(make_model):
    with make_model(context=64, tokenizer=False).session() as session:
        session.generate(IDS[:40], max_tokens=4, **GREEDY)
        with pytest.raises(CapacityError, match="limit of 64"):
            session.generate(IDS[:60], max_tokens=5)
        with pytest.raises(UsageError):
            session.generate([], max_tokens=5)
        assert session.generate(IDS[:41], max_tokens=3, **GREEDY).token_ids == fresh(make_model, IDS[:41], 3)


def test_what_a_failed_step_was_to_write_is_not_reused(make_model, monkeypatch):
    """It had its positions already, and no keys there."""
    model = make_model(tokenizer=False)
    with model.session() as session:
        session.generate(IDS[:20], max_tokens=2, **GREEDY)
        with monkeypatch.context() as patched:
            patched.setattr(type(model.executor), "step", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.generate(IDS[:40], max_tokens=5, **GREEDY)
        got = session.generate(IDS[:41], max_tokens=3, **GREEDY)
        assert (got.reused, got.token_ids) == (0, fresh(make_model, IDS[:41], 3))


def test_a_session_holds_its_slot_until_closed(make_model):
    model = make_model(slots=1)
    with model.session():
        assert not model.executor.kv.fits(1)
    assert model.executor.kv.fits(512)


def test_closing_twice_leaves_the_next_session_alone(make_model):
    model = make_model(tokenizer=False)
    first = model.session()
    first.close()
    with model.session() as second:
        first.close()
        assert second.generate(IDS[:20], max_tokens=3, **GREEDY).token_ids == fresh(make_model, IDS[:20], 3)
        second.close()
        with pytest.raises(UsageError, match="this session is closed"):
            second.generate(IDS[:20], max_tokens=3)
