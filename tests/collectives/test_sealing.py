"""A pickle is opened only if a rank of the job has sealed it in this call."""

import contextlib
import os
import pickle

import pytest
import torch

from distman import DistributedManager, RankFailedError
from distman._job.meeting.job_store import JobStore
from distman.collectives import _objects, all_gather_objects, broadcast_data, gather_objects
from distman.collectives._objects import ForeignPickleError, Seal
from distman.testing import ranks
from tests.collectives.reference import in_one_job

KEY = b"k" * 32


@contextlib.contextmanager
def keyed(value=KEY):
    """The groups of these tests are made by other code, and have no key of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobStore, "key", value)
        yield


def world():
    return DistributedManager().resolve_group()


@ranks(1, 3)
@in_one_job(size=[0, 1, 100, 100_000])
def test_sealed_objects_arrive(rank, world_size, size):
    with keyed():
        for _ in range(3):
            assert broadcast_data([os.getpid(), "x" * size], world_size - 1)[1] == "x" * size
            assert all_gather_objects((rank, b"x" * size)) == [(one, b"x" * size) for one in range(world_size)]
            assert gather_objects(rank) == (list(range(world_size)) if rank == 0 else None)


@pytest.mark.parametrize("call", [broadcast_data, all_gather_objects, gather_objects])
@ranks(2)
def test_what_another_key_has_sealed_is_not_opened(rank, tmp_path, call):
    marker = tmp_path / "opened"

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    told = pytest.raises((ForeignPickleError, RankFailedError), match="must be sealed by that rank in the same call")
    with keyed(KEY if rank == 1 else b"another key"), told:
        call(Harmful())
    assert not marker.exists()


@pytest.mark.parametrize("key", [KEY, b""])
@ranks(3)
def test_a_changed_message_is_an_error_on_all_ranks(rank, key, monkeypatch):
    def changed(message):
        text = bytearray(to_text(message))
        text[32 if key else 0] ^= 1  # the first byte of the pickle
        return bytes(text)

    to_text = _objects._to_text
    if rank == 1:
        monkeypatch.setattr(_objects, "_to_text", changed)
    mine = ForeignPickleError if key else pickle.UnpicklingError
    words = "must be sealed by that rank" if key else "unpickling stack underflow"
    with keyed(key), pytest.raises(mine if rank == 1 else RankFailedError, match=words):
        broadcast_data([torch.zeros(100_000), "x"])


@ranks(2)
def test_a_seal_is_for_one_call_of_one_rank(rank):
    text = pickle.dumps("text")
    with keyed():
        first, second = Seal(world()), Seal(world())
    sealed = first.put_on(text)
    assert first.take_off(sealed, rank) == text
    with pytest.raises(ForeignPickleError):
        second.take_off(sealed, rank)
    with pytest.raises(ForeignPickleError):
        first.take_off(text, rank)
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(ForeignPickleError):
            first.take_off(bytes(changed), rank)


@ranks(1)
def test_without_a_key_nothing_is_sealed():
    assert Seal(world()).put_on(b"text") == b"text"
    assert Seal(world()).take_off(b"text", 0) == b"text"
