"""Philox against the generator's published vectors and against another implementation."""

import torch

from flintc.runtime.philox import philox4x32, uniform

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


def plain_philox(counter, key):
    """The definition in unbounded Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def test_published_vectors_in_one_batch():
    counters = [torch.tensor([words(c)[i] for c, _, _ in KNOWN_ANSWERS]) for i in range(4)]
    keys = [torch.tensor([words(k)[i] for _, k, _ in KNOWN_ANSWERS]) for i in range(2)]
    got = torch.stack(philox4x32(tuple(counters), tuple(keys)), 1)
    assert got.tolist() == [list(words(result)) for _, _, result in KNOWN_ANSWERS]


def test_random_words_against_plain_integers():
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(0, 2**32, (6, 50), generator=generator)
    got = torch.stack(philox4x32(tuple(block[:4]), tuple(block[4:])), 1)
    for i in range(50):
        assert tuple(got[i].tolist()) == plain_philox(block[:4, i].tolist(), block[4:, i].tolist())


def test_uniform_uses_all_64_bits_of_the_seed():
    seeds = torch.tensor([5, 5 + 2**32, -1, 5])
    positions = torch.tensor([3, 3, 3, 4])
    first, second, _, _ = plain_philox((3, 0, 0, 0), (5, 0))
    got = uniform(seeds, positions)
    assert got[0].item() == ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert len(set(got.tolist())) == 4


def test_uniform_is_uniform():
    count = 40_000
    got = uniform(torch.full((count,), 7), torch.arange(count))
    assert got.min() >= 0
    assert got.max() < 1
    bins = torch.histc(got, 20, 0, 1)
    chi_square = ((bins - count / 20) ** 2 / (count / 20)).sum().item()
    assert chi_square < 43.8  # 19 degrees of freedom, one in a thousand
