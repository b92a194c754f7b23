from hybridflow.generation.blocks import BlockPool
from hybridflow.generation.prefix_cache import ROOT, PrefixCache


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_used, pool.num_kept, pool.num_free


def test_a_block_is_free_again_when_its_last_user_is_gone():
    pool = BlockPool(3, PrefixCache())
    blocks = [pool.take(), pool.take()]
    assert blocks == [0, 1] and counts(pool) == (2, 0, 1)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert counts(pool) == (1, 0, 2)
    pool.release(blocks[:1])
    assert counts(pool) == (0, 0, 3)


def test_a_block_whose_content_is_known_is_kept_and_found():
    cache = PrefixCache()
    pool = BlockPool(2, cache)
    block = pool.take()
    node = cache.register(ROOT, (5,), block)
    pool.release([block])
    assert counts(pool) == (0, 1, 1) and pool.num_available == 2 and pool.is_kept(block)
    assert cache.find(ROOT, (5,)) == (node, block)
    pool.share([block])
    assert counts(pool) == (1, 0, 1) and not pool.is_kept(block)


def test_kept_blocks_go_when_nothing_is_free_the_longest_unused_first_and_leaves_before_their_parents():
    cache = PrefixCache()
    pool = BlockPool(5, cache)
    old, new = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for first, blocks in ((1, old), (3, new)):
        node = cache.register(ROOT, (first,), blocks[0])
        cache.register(node, (first + 1,), blocks[1])
    pool.release(old)
    pool.release(new)
    pool.share(old[:1])  # used again: the youngest of all after this
    pool.release(old[:1])
    assert [pool.take() for _ in range(5)] == [4, old[1], new[1], new[0], old[0]]
    assert len(cache) == 0 and counts(pool) == (5, 0, 0)


def test_after_new_weights_nothing_is_kept():
    cache = PrefixCache()
    pool = BlockPool(3, cache)
    blocks = [pool.take(), pool.take()]
    for block in blocks:
        cache.register(ROOT, (block,), block)
    pool.release(blocks[:1])
    pool.drop_kept()
    assert counts(pool) == (1, 0, 2) and cache.find(ROOT, (0,)) is None and cache.find(ROOT, (1,)) is None
    pool.release(blocks[1:])
    assert counts(pool) == (0, 0, 3)
