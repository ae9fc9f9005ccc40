"""Messages over the sockets of one host: order, full buffers, several threads, forks, and what ends a wait."""

import contextlib
import gc
import linecache
import os
import random
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

from distman._torch_internals import is_lost_connection
from distman.collectives._transport import _connections
from distman.collectives._transport._connections import IN_SEGMENT, PIECE, WAS_READ, Connections, Frame
from distman.collectives._transport._segments import Segments

LIMIT = 60.0
made_here = []


@pytest.fixture(autouse=True)
def _close_all():
    """Close the connections of each test, whose threads end by it."""
    yield
    while made_here:
        made_here.pop().close()
    for thread in threading.enumerate():
        if thread.name == "distman-transport":
            thread.join()
    gc.collect()  # what an error of a test has held


def connected(*numbers, timeout=LIMIT):
    """Return the connections of some processes, all of them in this one."""
    sockets = {number: {} for number in numbers}
    for one in numbers:
        for other in numbers:
            if one < other:
                sockets[one][other], sockets[other][one] = socket.socketpair()
    for one in (end for ends in sockets.values() for end in ends.values()):
        one.settimeout(0)
    made = {number: Connections(sockets[number], Segments(), timeout) for number in numbers}
    made_here.extend(made.values())
    return made


def send(connections, rank, tag, data):
    return connections.send(rank, Frame(PIECE, tag=tag, size=len(data)), memoryview(data))


def ask(connections, rank, tag, size):
    """Return a message that is asked for."""
    return connections.ask(rank, tag, size, memoryview(bytearray(size)))


def received(connections, rank, tag, size):
    message = ask(connections, rank, tag, size)
    connections.wait(rank, message)
    return bytes(message.room)


def is_full(connections):
    return any(link.pending for link in connections.links.values())


def test_messages_of_one_tag_and_size_arrive_in_order_and_others_whenever_they_are_asked_for():
    one, other = connected(3, 7).values()
    for value in range(5):
        send(one, 7, 11, bytes([value]))
        send(one, 7, 22, bytes([value, value]))
    send(one, 7, 11, b"of this tag, but of another size")
    assert received(other, 3, 11, 32) == b"of this tag, but of another size"
    assert [received(other, 3, 22, 2) for _ in range(5)] == [bytes([value] * 2) for value in range(5)]
    assert [received(other, 3, 11, 1) for _ in range(5)] == [bytes([value]) for value in range(5)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_messages_are_received_in_the_order_in_which_they_were_asked_for(order):
    one, other = connected(0, 1).values()
    asked = [ask(other, 0, 5, 1) for _ in order]
    for value in range(3):
        send(one, 1, 5, bytes([value]))
    for place in order:
        other.wait(0, asked[place])
    assert [message.room[0] for message in asked] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_messages_of_any_sizes_through_full_buffers(seed):
    """Both processes send at random, in threads, more than there is room for; heads and data come in any parts."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    sizes = [1, 21, 22, 23, 500, 2**16, 2**18, 2**20]
    ends = connected(0, 1)
    plans = {rank: [(draw.randint(0, 2), draw.choice(sizes)) for _ in range(60)] for rank in ends}
    errors = []

    def send_all(rank):
        messages = []
        for number, (tag, size) in enumerate(plans[rank]):
            messages.append(send(ends[rank], 1 - rank, tag, bytes([number]) * size))
            if number % 7 == 0:
                ends[rank].wait(1 - rank, messages.pop())
        for message in messages:
            ends[rank].wait(1 - rank, message)

    def receive_all(rank, tag):
        for number, (its_tag, size) in enumerate(plans[1 - rank]):
            if its_tag == tag:
                assert received(ends[rank], 1 - rank, tag, size) == bytes([number]) * size

    def run(call, *args):
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(send_all, rank)) for rank in ends]
    threads += [threading.Thread(target=run, args=(receive_all, rank, tag)) for rank in ends for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("size", [1, 21, 22, 2**16, 2**20])
def test_a_message_that_is_asked_for_when_a_part_of_it_has_come(size):
    one, other = connected(0, 1).values()
    link = one.links[1]
    data = bytes(range(256)) * (size // 256 + 1)
    whole = _connections._HEAD.pack(*Frame(PIECE, tag=1, size=size)) + data[:size]
    for cut in (1, 21, 22, 22 + size // 2):
        link.socket.settimeout(None)
        sender = threading.Thread(target=lambda cut=cut: link.socket.sendall(whole[:cut]))
        sender.start()
        while sender.is_alive():
            other.look([0])
        sender.join()
        other.look([0])
        message = ask(other, 0, 1, size)
        sender = threading.Thread(target=lambda cut=cut: link.socket.sendall(whole[cut:]))
        sender.start()
        other.wait(0, message)
        sender.join()
        assert bytes(message.room) == data[:size]


def test_what_is_left_is_written_while_the_program_waits_elsewhere():
    one, other = connected(0, 1).values()
    messages = [send(one, 1, 1, bytes([value]) * 2**18) for value in range(9)]
    assert is_full(one)
    one.flush_later()
    assert [received(other, 0, 1, 2**18) == bytes([value]) * 2**18 for value in range(9)] == [True] * 9
    for thread in threading.enumerate():
        if thread.name == "distman-transport":
            thread.join()  # it ends with the last message
    assert [message.is_done for message in messages] == [True] * 9
    assert not is_full(one)


def test_what_is_left_is_written_by_a_wait():
    one, other = connected(0, 1).values()
    messages = [send(one, 1, 1, bytes(2**18)) for _ in range(4)]
    reader = threading.Thread(target=lambda: [received(other, 0, 1, 2**18) for _ in range(4)])
    reader.start()
    one.wait(1, messages[-1])
    reader.join()


def test_a_wait_ends_when_either_side_closes_and_what_came_before_is_read():
    one, other = connected(0, 1).values()
    send(one, 1, 1, b"before")
    timer = threading.Timer(0.05, one.close)
    timer.start()
    other.look([0])
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0 of the group has left it or ended"):
        received(other, 0, 2, 1)
    timer.join()
    other.close()
    for connections, rank in ((one, 1), (other, 0)):
        with pytest.raises(RuntimeError, match="this rank has given up the group"):
            send(connections, rank, 1, b"after")
        with pytest.raises(RuntimeError, match="this rank has given up the group"):
            received(connections, rank, 1, 1)


def test_what_a_rank_has_sent_before_it_closed_is_read_though_it_has_left_things_unread():
    one, other = connected(0, 1).values()
    send(other, 0, 9, b"nobody reads this")
    send(one, 1, 1, b"last words")
    one.close()
    assert received(other, 0, 1, 10) == b"last words"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_waits_of_all_threads_end_when_their_own_side_closes(num_threads):
    one, _ = connected(0, 1).values()
    errors = []

    def wait():
        try:
            received(one, 1, 1, 1)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    timer = threading.Timer(0.05, one.close)
    timer.start()
    for thread in [*threads, timer]:
        thread.join()
    assert len([error for error in errors if "has given up the group" in error]) == num_threads


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_wait_has_a_limit_and_says_for_whom(seconds):
    one, _ = connected(0, 1, timeout=seconds).values()
    limit = f"Connection timed out after {seconds:g} s: rank 1 of the group has not"
    with pytest.raises(RuntimeError, match=f"{limit} sent what this rank waits for") as caught:
        received(one, 1, 1, 1)
    assert is_lost_connection(caught.value)
    one, _ = connected(0, 1, timeout=seconds).values()
    with pytest.raises(RuntimeError, match=f"{limit} read what this rank sends"):
        one.wait(1, send(one, 1, 1, bytes(2**22)))


def test_a_limit_counts_while_others_send_all_the_time():
    one, _, third = connected(0, 1, 2, timeout=0.5).values()
    is_over = threading.Event()

    def ring():
        with contextlib.suppress(RuntimeError):
            while not is_over.is_set():
                send(third, 0, 9, b"!")

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"Connection timed out after 0\.5 s: rank 1"):
            received(one, 1, 1, 1)
    finally:
        is_over.set()
        thread.join()


def test_a_message_that_cannot_be_is_an_error():
    one, other = connected(0, 1).values()
    one.links[1].socket.sendall(b"\xff" * _connections._HEAD.size)
    with pytest.raises(RuntimeError, match="rank 0 of the group must send what this rank knows, got kind 255"):
        received(other, 0, 1, 1)


def test_a_signal_handler_ends_a_wait_by_an_exception_and_the_others_with_it():
    def handle(*_):
        raise InterruptedError

    one, other = connected(0, 1).values()
    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(InterruptedError):
            received(one, 1, 1, 1)
        one.close()  # as the call does that is cut short
    finally:
        signal.signal(signal.SIGUSR1, before)
        timer.join()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):  # a part of a message may be lost
        received(other, 0, 1, 1)


@pytest.mark.parametrize("number", range(0, 120, 3))
def test_a_signal_at_any_line_of_a_message_gives_it_or_closes_the_connection(number):
    one, other = connected(0, 1).values()
    left = [number]

    def trace(frame, event, _):
        if frame.f_code.co_filename != _connections.__file__ or frame.f_code.co_name in ("__enter__", "__exit__"):
            return None
        if event == "line" and not linecache.getline(_connections.__file__, frame.f_lineno).lstrip().startswith("with"):
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise InterruptedError
        return trace

    before = sys.gettrace()
    was_interrupted = True
    sys.settrace(trace)
    try:
        send(one, 1, 1, b"7")
        assert received(other, 0, 1, 1) == b"7"
        was_interrupted = False
    except InterruptedError:
        pass
    finally:
        sys.settrace(before)
    if was_interrupted:  # whoever is in the call closes the group, if the connections have not
        one.close()
    with pytest.raises(RuntimeError, match="Connection closed") if was_interrupted else contextlib.nullcontext():
        send(one, 1, 1, b"8")
        assert received(other, 0, 1, 1) == b"8"


def test_a_forked_process_closes_its_copies_alone():
    one, other = connected(0, 1).values()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(RuntimeError):
            one.close()
            send(other, 0, 1, b"from the child")
        os.read(reading, 1)  # it lives on, while its parent goes
        os._exit(0)
    send(one, 1, 1, b"1")
    assert received(other, 0, 1, 1) == b"1"
    one.close()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        received(other, 0, 1, 1)
    os.write(writing, b"!")
    assert os.waitpid(child, 0)[1] == 0
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_that_wait_for_messages_of_each_other(num_threads):
    """Whoever reads finds messages of others, and must wake them; whoever has its own hands the reading over."""
    one, other = connected(0, 1).values()
    wrong = []

    def play(connections, rank, tag, serves):
        for number in range(200):
            if serves:
                send(connections, rank, tag, bytes([number]))
            if received(connections, rank, tag, 1) != bytes([number]):
                wrong.append((tag, number))
            if not serves:
                send(connections, rank, tag, bytes([number]))

    threads = [threading.Thread(target=play, args=(one, 1, tag, True)) for tag in range(num_threads)]
    threads += [threading.Thread(target=play, args=(other, 0, tag, False)) for tag in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def tell(connections, segment, rank, tag):
    frame = Frame(IN_SEGMENT, segment.slot, tag, 16, 64)
    connections.send(rank, frame, segment=segment)
    segment.is_held = False


def segment_of(connections, value):
    segment = connections.links[1]._segments.take({1: (0, 2**20)})
    segment.memory.fill_(value)
    return segment


def told(connections, rank, tag):
    message = connections.ask(rank, tag, 16, None)
    connections.wait(rank, message)
    return message


def test_a_segment_is_taken_again_when_all_have_read_it():
    one, other, third = connected(0, 1, 2).values()
    segments = one.links[1]._segments
    segment = segment_of(one, 5)
    for number in range(3):
        tell(one, segment, 1, number)
        tell(one, segment, 2, number)
        for reader in (other, third):
            one.look(segments.readers())
            assert not segment.is_free()
            message = told(reader, 0, number)
            assert message.memory.tolist() == [5] * 16
            reader.send(0, Frame(WAS_READ, message.slot))
        one.look(segments.readers())
        assert segments.take({1: (0, 2**20)}) is segment
        assert segments.take({1: (0, 2**20)}) is not segment
        segments.made[1].is_held = False


def test_a_segment_that_is_too_small_is_replaced_and_who_reads_it_may_go_on():
    one, other = connected(0, 1).values()
    segments = one.links[1]._segments
    first, second = segment_of(one, 1), segment_of(one, 2)
    for segment in (first, second):
        tell(one, segment, 1, 3)
    assert segments.take({1: (0, 2**20)}) is None
    messages = [told(other, 0, 3) for _ in range(2)]
    other.send(0, Frame(WAS_READ, messages[0].slot))
    one.look([1])
    larger = segments.take({1: (0, 2**21)})
    assert larger.slot == first.slot
    larger.memory.fill_(3)
    tell(one, larger, 1, 4)
    assert told(other, 0, 4).memory.tolist() == [3] * 16
    assert [message.memory[0].item() for message in messages] == [1, 2]
    assert segments.take({1: (0, 2**60)}) is None


def test_a_segment_whose_reader_has_gone_is_not_written_to_again():
    one, other = connected(0, 1).values()
    segment = segment_of(one, 1)
    tell(one, segment, 1, 3)
    message = told(other, 0, 3)
    other.close()
    for _ in range(3):
        one.look([1])
        assert not segment.is_free()
    assert message.memory.tolist() == [1] * 16


def test_a_reader_that_may_open_no_more_files_says_so(monkeypatch):
    one, other = connected(0, 1).values()
    link = other.links[0]
    tell(one, segment_of(one, 1), 1, 3)
    monkeypatch.setattr(_connections, "_ROOM_FOR_DESCRIPTOR", 0)  # as where the kernel finds no number for it
    with pytest.raises(OSError, match="ulimit -n"):
        told(other, 0, 3)
    assert not link._descriptors


def test_nothing_is_left_open():
    def num_open():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    ends = connected(0, 1, 2)
    tell(ends[0], segment_of(ends[0], 1), 1, 3)  # and nobody asks for it
    ends[1].look([0])
    num_kept = 0 if sys.version_info >= (3, 13) else 2  # by Python, for each mapping
    assert num_open() == before + 6 + 1 + num_kept
    made_here.clear()
    del ends
    assert num_open() == before


def test_connections_without_a_user_are_closed_without_the_garbage_collector():
    one, other = connected(0, 1).values()
    made_here.clear()
    gc.disable()
    try:
        del one
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            received(other, 0, 1, 1)
    finally:
        gc.enable()


def test_memory_of_any_tensor_that_has_some():
    from distman.collectives._transport._host import as_bytes

    for tensor in (
        torch.arange(3.0, requires_grad=True),
        torch.ones(1, 1).expand(1, 1),
        torch.ones((), dtype=torch.bfloat16),
        torch.ones(2, 0),
        torch.tensor([True, False]),
        torch.ones(2, 3, dtype=torch.complex128),
    ):
        assert (
            bytes(as_bytes(tensor))
            == bytes(tensor.detach().contiguous().view(-1).untyped_storage().tolist())[: tensor.nbytes]
        )
