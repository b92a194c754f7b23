from hybridflow.generation.prefix_cache import ROOT, PrefixCache


def test_the_same_tokens_behind_other_tokens_are_another_content():
    cache = PrefixCache()
    one, other = cache.register(ROOT, (1, 2), 7), cache.register(ROOT, (3, 4), 8)
    behind = cache.register(one, (5, 6), 9)
    assert cache.find(one, (5, 6)) == (behind, 9)
    assert cache.find(other, (5, 6)) is None and cache.find(ROOT, (5, 6)) is None
    assert cache.find(ROOT, (3, 4)) == (other, 8)


def test_a_content_keeps_its_first_block():
    cache = PrefixCache()
    node = cache.register(ROOT, (1,), 3)
    assert cache.register(ROOT, (1,), 4) == node
    assert cache.find(ROOT, (1,)) == (node, 3) and cache.holds(3) and not cache.holds(4)


def test_what_followed_a_forgotten_block_is_not_found_behind_its_successor():
    cache = PrefixCache()
    parent = cache.register(ROOT, (1,), 0)
    cache.register(parent, (2,), 1)
    cache.forget(0)
    again = cache.register(ROOT, (1,), 5)
    assert again != parent and cache.find(again, (2,)) is None
    assert cache.holds(1) and not cache.holds(0)
    cache.forget(1)
    assert len(cache) == 1


def test_clear():
    cache = PrefixCache()
    node = cache.register(ROOT, (1,), 0)
    cache.clear()
    assert len(cache) == 0 and not cache.holds(0) and cache.find(ROOT, (1,)) is None
    assert cache.register(ROOT, (1,), 0) != node
