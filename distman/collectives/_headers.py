"""A first message that carries a signature: ranks that want different things find out, and none waits for ever."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._base.text import printable
from distman._job.groups.registry import Group
from distman._torch_internals import despite_traces
from distman.collectives._border import refusal_text
from distman.collectives._exchange import begin_all_reduce, begin_sum
from distman.collectives._numbers import control_device
from distman.collectives._objects import all_gather_objects
from distman.errors import PlanMismatchError
from distman.manager import DistributedManager

MESSAGE_WORDS = 512
"""Words of 8 bytes in the first message. Its length is fixed, so that ranks which disagree still send equal messages;
with 4 KiB it is still bound by latency."""
_SIGNATURE_WORDS = 4  # of 16 bits: 64 bits of a digest, of which even the sum over 65,536 ranks is exact in a float64
SUMS_OF_NUMBERS = "sums of numbers"
_REFUSAL = "refusal"
HEADER_WORDS = 1 + 2 * _SIGNATURE_WORDS
"""One word of ones, the words of a signature, their squares; the rest is room for data to be summed."""


@functools.lru_cache(maxsize=64)
def signed_message(text: str, device: torch.device) -> torch.Tensor:
    """Return the message without data, in float64 whatever it is about; clone it before the ranks' are summed.

    Ranks that want different things must all sum numbers of one type: on NCCL nobody knows what else comes of it.
    """
    digest = hashlib.sha256(text.encode()).digest()
    words = [int.from_bytes(digest[2 * word : 2 * word + 2], "big") for word in range(_SIGNATURE_WORDS)]
    message = torch.zeros(MESSAGE_WORDS, dtype=torch.float64, device="cpu")  # whatever the default device is
    message[:HEADER_WORDS] = torch.tensor([1, *words, *(word * word for word in words)], device="cpu")
    return message.to(device)


def is_signed_by_all(header: Sequence[float], num_ranks: int) -> bool:
    """Return whether the ranks' signatures were equal: then the square of a sum is that of equal terms."""
    ones, *words = header
    sums, squares = words[:_SIGNATURE_WORDS], words[_SIGNATURE_WORDS:]
    return ones == num_ranks and all(
        total * total == num_ranks * square for total, square in zip(sums, squares, strict=True)
    )


def texts_of_all(text: str, group: Group) -> list[str]:
    """Return what the ranks want whose signatures differ, as JSON lists; raise if one has refused the call."""
    texts = all_gather_objects(text, group.process_group)
    refusals = [why for operation, why, *_ in map(json.loads, texts) if operation == _REFUSAL]
    if refusals:
        raise PlanMismatchError("\n".join(map(printable, refusals)))
    return texts


def refuse_in_sum(what: str, error: Exception, operation: str, group: Group) -> None:
    """Take part in the sum with which a call begins, and let the signature say that this rank refuses."""
    text = json.dumps([_REFUSAL, refusal_text(error, operation, group), []])
    message = signed_message(text, control_device(group, DistributedManager().device)).clone()
    total = begin_sum(message, group, what)()
    if not is_signed_by_all(total[:HEADER_WORDS].tolist(), group.size):
        all_gather_objects(text, group.process_group)


@despite_traces
def sum_numbers(numbers: Sequence[float], text: str, group: Group, device: torch.device) -> list[float] | None:
    """Return the sums of numbers over a group, in double precision; None on all ranks if their texts differ."""
    if group.size == 1:
        return list(numbers)
    data = torch.tensor(numbers, dtype=torch.float64, device=device)
    message = signed_message(text, device).clone()
    fits = len(numbers) <= MESSAGE_WORDS - HEADER_WORDS
    end = HEADER_WORDS + len(numbers) if fits else HEADER_WORDS
    if fits:
        message[HEADER_WORDS:end] = data
    message = begin_sum(message, group, SUMS_OF_NUMBERS)()
    header_and_sums: list[float] = message[:end].tolist()
    if not is_signed_by_all(header_and_sums[:HEADER_WORDS], group.size):
        return None
    if fits:
        return header_and_sums[HEADER_WORDS:]
    sums: list[float] = begin_all_reduce(data, dist.ReduceOp.SUM, group)().tolist()
    return sums
