"""Reading a key that may be gone, in every kind of store that a job can have."""

import pytest
import torch.distributed as dist

from distman._coordination.messages import read_at_once


def tcp_store(_):
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def file_store(folder):
    return dist.FileStore(str(folder / "store"), 1)


@pytest.mark.parametrize("make", [tcp_store, file_store, lambda _: dist.HashStore()])
def test_a_key_is_read_whether_it_is_there_or_not(make, tmp_path):
    whole = make(tmp_path)
    for store in (whole, dist.PrefixStore("job", whole)):
        assert read_at_once(store, "key") is None
        assert not store.check(["key"])
        store.set("key", "text")
        assert read_at_once(store, "key") == "text"
        assert store.get("key") == b"text"
