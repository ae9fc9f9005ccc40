"""The store of a process group that other code made."""

import pytest
import torch.distributed as dist

from distman._rendezvous.store import adopt_store


def test_who_serves_the_store_of_an_adopted_group_knows():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    adopted = adopt_store(dist.PrefixStore("job", dist.PrefixStore("group", store)))
    assert (adopted.is_host, adopted.url) == (True, f"tcp://127.0.0.1:{store.port}")


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_without_a_server_is_served_by_nobody(kind, tmp_path):
    store = dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 1)
    adopted = adopt_store(dist.PrefixStore("job", store))
    assert (adopted.is_host, adopted.url) == (False, "the store of the process group")
