import numpy as np

from hybridflow.generation.random import GOLDEN_GAMMA, splitmix64, stream_keys, uniforms


def test_splitmix64_known_answers():
    # the published first outputs of SplitMix64 seeded with 1234567
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    got = splitmix64(np.uint64(1234567) + np.arange(5).astype(np.uint64) * GOLDEN_GAMMA)
    assert got.tolist() == want


def test_draws_known_answers():
    keys = stream_keys(7, np.array([0, 12, 2**40]), np.array([0, 3, 1]))
    assert keys.tolist() == [reference_key(7, 0, 0), reference_key(7, 12, 3), reference_key(7, 2**40, 1)]
    draws = uniforms(keys, np.array([0, 5, 9]))
    want = [(mix(reference_key(*c) + position * int(GOLDEN_GAMMA)) >> 11) / 2**53
            for c, position in (((7, 0, 0), 0), ((7, 12, 3), 5), ((7, 2**40, 1), 9))]
    assert draws.tolist() == want


def mix(state):
    """SplitMix64 in unbounded Python integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def reference_key(seed, prompt, sample):
    return mix(mix(mix(seed % 2**64) ^ prompt) ^ sample)


def test_a_draw_depends_on_its_counters_only():
    ids, samples, positions = np.arange(1000), np.arange(1000) % 8, np.arange(1000) % 31
    together = uniforms(stream_keys(3, ids, samples), positions)
    order = np.random.default_rng(0).permutation(1000)
    shuffled = uniforms(stream_keys(3, ids[order], samples[order]), positions[order])
    assert np.array_equal(shuffled, together[order])
    one = uniforms(stream_keys(3, ids[7:8], samples[7:8]), positions[7:8])
    assert np.array_equal(one, together[7:8])


def test_draws_are_uniform_along_every_counter():
    """Chi-square over 64 bins (63 degrees of freedom: mean 63, deviation 11.2) along one counter at a time."""
    n = 1 << 16
    zeros, count = np.zeros(n, np.int64), np.arange(n)
    for draws in (uniforms(stream_keys(0, count, zeros), zeros), uniforms(stream_keys(0, zeros, count), zeros),
                  uniforms(stream_keys(0, zeros, zeros), count)):
        assert 0 <= draws.min() and draws.max() < 1
        bins = np.bincount((draws * 64).astype(np.int64), minlength=64)
        assert ((bins - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * 11.2
        centred = draws - 0.5
        correlation = (centred[1:] * centred[:-1]).mean() * 12
        assert abs(correlation) < 5 / n**0.5


def test_neighbouring_streams_are_independent():
    keys = stream_keys(11, np.arange(64).repeat(64), np.tile(np.arange(64), 64))
    assert len(np.unique(keys)) == 4096
    draws = uniforms(keys, np.arange(64)[:, None])  # [64, 4096]
    centred = (draws - 0.5) * 12**0.5
    for shifted in (np.roll(centred, 1, 1), np.roll(centred, 64, 1), np.roll(centred, 1, 0)):
        assert abs((centred * shifted).mean()) < 5 / centred.size ** 0.5


def test_seeds_of_any_size_differ():
    zero = np.zeros(1, np.int64)
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 2]
    assert len({int(stream_keys(seed, zero, zero)[0]) for seed in seeds}) == len(seeds)
    assert np.array_equal(stream_keys(-1, zero, zero), stream_keys(2**64 - 1, zero, zero))
