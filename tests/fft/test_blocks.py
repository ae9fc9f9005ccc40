"""How a tensor is cut into blocks that fit a processor's cache."""

import torch

from distman.fft._blocks import indices_of_blocks


def test_blocks_are_small_and_whole_where_they_must_be_and_cover_the_tensor_once():
    tensor = torch.zeros(64, 1024, 64)
    blocks = [tensor[index] for index in indices_of_blocks(tensor, [2])]
    assert len(blocks) > 1
    assert all(block.numel() * 4 <= 2**19 * torch.get_num_threads() for block in blocks)
    assert all(block.shape[2] == 64 for block in blocks)
    for block in blocks:
        block += 1
    assert tensor.eq(1).all()


def test_a_small_tensor_is_one_block():
    assert list(indices_of_blocks(torch.zeros(4, 4), [1])) == [(slice(0, 4), slice(None))]
