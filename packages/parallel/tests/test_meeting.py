"""Ranks of one start of a job meet, whatever earlier starts have left in its store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from gem_opkit.errors import ConfigError
from gem_parallel.meeting import store_of_this_start

LIMIT = timedelta(seconds=20)


def meet(store, size):
    """All ranks of a start, each in a thread."""
    with ThreadPoolExecutor(size) as ranks:
        found = ranks.map(lambda rank: store_of_this_start(store, rank, size, LIMIT), range(size))
        return list(found)


def test_all_ranks_of_a_start_share_keys_that_no_other_start_reads():
    store = dist.HashStore()
    first = meet(store, 4)
    first[0].set("address", "of a rank that is dead by now")
    second = meet(store, 4)
    assert not second[0].check(["address"])
    second[3].set("address", "new")
    assert [one.get("address") for one in second] == [b"new"] * 4


def test_another_number_of_ranks_meets_in_the_same_store():
    store = dist.HashStore()
    meet(store, 4)
    few, many = meet(store, 2), meet(store, 6)
    few[1].set("k", "few")
    many[5].set("k", "many")
    assert (few[0].get("k"), many[0].get("k")) == (b"few", b"many")


def test_a_rank_that_died_while_it_asked_is_not_counted():
    store = dist.HashStore()
    store.set("gem/hello/1", "asked by a process that is gone")
    with pytest.raises(ConfigError, match="every rank must come within 0 s; got 1 of 2"):
        store_of_this_start(store, 0, 2, timedelta(seconds=0.2))
    assert len(meet(store, 2)) == 2


def test_a_rank_that_nobody_answers_says_so():
    told = "the first rank must answer rank 3 within 0 s; got .*; look at the first host"
    with pytest.raises(ConfigError, match=told):
        store_of_this_start(dist.HashStore(), 3, 4, timedelta(seconds=0.2))
