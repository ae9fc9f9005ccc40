"""How a tensor is cut into blocks that fit a processor's cache."""

import torch

from distman.fft._blocks import _BLOCK_BYTES, _FEWEST, _MOST_BYTES, indices_of_blocks


def test_blocks_are_small_and_whole_where_they_must_be_and_cover_the_tensor_once():
    tensor = torch.zeros(64, 1024, 96)
    blocks = [tensor[index] for index in indices_of_blocks(tensor, [2])]
    assert len(blocks) > 1
    assert all(block.numel() * 4 <= _BLOCK_BYTES * torch.get_num_threads() for block in blocks)
    assert all(block.shape[2] == 96 for block in blocks)
    for block in blocks:
        block += 1
    assert tensor.eq(1).all()


def test_a_small_tensor_is_one_block():
    assert list(indices_of_blocks(torch.zeros(4, 4), [1])) == [(slice(0, 4), slice(None))]


def test_what_comes_last_where_blocks_go_is_cut_last_and_not_into_slivers():
    planes = torch.empty(64, 8, 512, 512)
    (index, *_) = indices_of_blocks(planes, [2, 3], across=0)
    assert planes[index].shape == (_FEWEST, 1, 512, 512)


def test_a_block_takes_so_much_memory_and_no_more():
    volumes = torch.empty(8, 256, 256, 256)
    blocks = [volumes[index] for index in indices_of_blocks(volumes, [1, 2, 3], across=0)]
    assert {block.shape[0] for block in blocks} == {1}  # for one is larger than that
    planes = torch.empty(64, 1024, 1024)
    blocks = [planes[index] for index in indices_of_blocks(planes, [1, 2], across=0)]
    assert all(block.nbytes == max(_MOST_BYTES, _BLOCK_BYTES * torch.get_num_threads()) for block in blocks)
