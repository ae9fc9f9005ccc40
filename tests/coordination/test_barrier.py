"""Who comes to a barrier too late."""

import pytest
from torch.distributed import HashStore

from distman._coordination.barrier import wait_for_all
from distman._coordination.store_group import StoreGroup
from distman._rendezvous.peers import complete
from distman.errors import BarrierTimeoutError, RankFailedError

from ..rendezvous.join_records import join_record


def test_who_comes_when_the_others_have_given_up_does_not_find_it_open():
    store = HashStore()
    peers = complete([join_record(0), join_record(1)])
    early, late = (StoreGroup(store, store, rank, range(2), peers) for rank in range(2))
    with pytest.raises(BarrierTimeoutError, match=r"rank 1 \(n1, pid 101\)"):
        wait_for_all(early, "save", timeout=0.01)
    with pytest.raises(RankFailedError, match="rank 0"):
        wait_for_all(late, "save", timeout=10.0)
