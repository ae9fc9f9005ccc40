"""Regions belong to a thread and to the threads that it starts; nothing is left of them afterwards."""

import sys
import threading

import torch

from distman._coordination.tracking import Restricted, depth, restriction
from distman._torch_internals import regions


def seen_by_a_thread(seen):
    thread = threading.Thread(target=lambda: seen.append(restriction()))
    thread.start()
    thread.join()


def test_new_threads_are_in_the_regions_of_their_maker():
    seen = []
    with Restricted("outer", frozenset({0, 1})), Restricted("inner", frozenset({0})) as inner:
        seen_by_a_thread(seen)
        assert depth() == 2
    seen_by_a_thread(seen)
    assert seen == [inner, None]


def test_a_thread_outlives_the_region_that_it_was_started_in():
    over, seen = threading.Event(), []
    thread = threading.Thread(target=lambda: (over.wait(), seen.append((depth(), restriction()))))
    with Restricted("outer", frozenset({0})) as outer:
        with Restricted("inner", frozenset({0})):
            thread.start()
        assert restriction() is outer
        over.set()
        thread.join()
    assert seen == [(1, outer)]


def test_a_thread_leaves_the_regions_before_it_ends():
    """The system would let go of them after Python's end of the thread, and abort a process that ends meanwhile."""
    seen = []

    class Seeing(threading.Thread):
        def run(self):
            seen.append(restriction())

    thread = Seeing()
    with Restricted("region", frozenset({0})) as region:
        thread.start()
        thread.join()
    thread.run()  # what the thread did, here
    assert (seen[0], regions()) == (region, ())


def test_a_backward_pass_has_the_regions_of_its_caller_in_every_thread():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, depth):
            ctx.depth = depth
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            if not ctx.depth:
                seen.append((threading.current_thread() is threading.main_thread(), restriction()))
                return grad, None
            with torch.enable_grad():
                inner = Look.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum()
            inner.backward()
            return grad, None

    with Restricted("region", frozenset({0})) as region:
        for depth_ in (0, 70):  # so deep that autograd takes a thread of its pool
            Look.apply(torch.ones(1, requires_grad=True), depth_).backward()
    assert seen == [(True, region), (False, region)]


def in_autograds_own_thread(look):
    """Return what a function returns within a backward pass, so deep that autograd takes a thread of its pool."""
    seen = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, depth):
            ctx.depth = depth
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.depth:
                with torch.enable_grad():
                    inner = Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum()
                inner.backward()
            else:
                assert threading.current_thread() is not threading.main_thread()
                seen.append(look())
            return grad, None

    Nested.apply(torch.ones(1, requires_grad=True), 70).backward()
    return seen[0]


def test_a_region_within_a_backward_pass_leaves_its_thread_as_it_was():
    def enter_one():
        with Restricted("inner", frozenset({0})):
            within = depth()
        return within, depth()

    with Restricted("outer", frozenset({0, 1})):
        assert in_autograds_own_thread(enter_one) == (2, 1)
    with Restricted("another", frozenset({0})) as another:
        assert in_autograds_own_thread(restriction) is another
    assert in_autograds_own_thread(depth) == 0


def test_of_several_threads_in_regions_a_backward_pass_has_those_of_all():
    inside, over = threading.Event(), threading.Event()

    def stay():
        with Restricted("of another thread", frozenset({1})):
            inside.set()
            over.wait()

    with Restricted("of both", frozenset({0, 1})) as of_both:
        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait()
        with Restricted("of this thread", frozenset({0})):
            found = in_autograds_own_thread(restriction)
        over.set()
        thread.join()
    assert found is of_both


def test_regions_are_kept_by_us_alone():
    """What torch is given for its own store of thread-local objects, it releases once too often up to 2.11."""
    with Restricted("region", frozenset({0})) as region:
        references = sys.getrefcount(region)
        for _ in range(3):
            with Restricted("inner", frozenset({0})):
                assert not torch._C._is_key_in_tls("distman.regions")
        assert sys.getrefcount(region) == references


def test_nothing_is_asked_outside_of_regions():
    included = torch._C._dispatch_tls_local_include_set
    before = str(included())
    with Restricted("region", frozenset({0})):
        assert str(included()) != before
    assert (str(included()), regions(), depth()) == (before, (), 0)
