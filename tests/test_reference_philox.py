"""The reference's random numbers: the published test vectors, and the mapping from elements to words."""

from __future__ import annotations

import pytest
import torch

from halfstep.reference.philox import philox_block, philox_words

# Random123's kat_vectors, lines "philox4x32 10": counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 on Python integers, which do not overflow."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q % 2**32, (p >> 32) ^ d ^ k1, p % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, expected):
    lanes = tuple(torch.tensor([word]) for word in words_of(counter))
    block = philox_block(lanes, tuple(words_of(key)))
    assert block.tolist() == [words_of(expected)]
    assert scalar_philox(words_of(counter), words_of(key)) == words_of(expected)


@pytest.mark.parametrize("first_index", [0, 1, 4, 7, 4 * 2**32 - 3, 2**40 + 2])
def test_element_e_takes_word_e_mod_4_of_counter_e_div_4(first_index):
    seed, t, param_id, stream = 2**32 + 5, 2**33 + 9, 17, 2
    words = philox_words(seed, t, param_id, stream, first_index, 11, "cpu")
    expected = []
    for e in range(first_index, first_index + 11):
        low, high = (e // 4) % 2**32, (e // 4) // 2**32
        expected.append(scalar_philox([low, high, param_id, stream], [5, 9])[e % 4])
    assert words.dtype == torch.int64
    assert words.tolist() == expected


def test_a_shard_draws_what_the_whole_tensor_draws():
    whole = philox_words(1, 2, 3, 0, 0, 1000, "cpu")
    for begin, end in [(0, 0), (0, 1), (1, 4), (3, 1000), (998, 1000), (5, 5), (1000, 1000)]:
        assert torch.equal(philox_words(1, 2, 3, 0, begin, end - begin, "cpu"), whole[begin:end])


def test_seed_step_tensor_and_stream_each_change_the_words():
    base = {"seed": 1, "t": 2, "param_id": 3, "stream": 0}
    drawn = [philox_words(**base, first_index=0, numel=64, device="cpu")]
    for name in base:
        drawn.append(philox_words(**{**base, name: base[name] + 1}, first_index=0, numel=64, device="cpu"))
    everything = torch.cat(drawn)
    # 320 words of 32 bits: the odds of any two equal are 320**2 / 2 / 2**32, about 1 in 84,000, and the draw is fixed
    assert everything.unique().numel() == everything.numel()


def test_every_bit_is_fair():
    words = philox_words(3, 1, 0, 0, 0, 2**16, "cpu")
    ones = torch.stack([(words >> bit) & 1 for bit in range(32)]).sum(1)
    # 2**16 fair coins have a standard deviation of 128; six of them for any of 32 bits: odds of 1 in 10**7
    assert (ones - 2**15).abs().max() < 6 * 128
