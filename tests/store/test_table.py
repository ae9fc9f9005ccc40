"""The table against torch's own store in memory, and its waits against what they mean."""

import re

import pytest
from hypothesis import given, settings, strategies
from torch.distributed import HashStore

from distman._store.frames import GIVEN_UP, MOST_NUMBER, OK, TIMED_OUT
from distman._store.table import NotANumberError, Table, Will

KEYS = strategies.sampled_from(["a", "b", "c"])
VALUES = strategies.sampled_from(["", "1", "-7", "x", "xy"])
KEY_LISTS = strategies.lists(KEYS, max_size=3)

WRITES = strategies.one_of(
    strategies.tuples(strategies.just("set"), KEYS, VALUES),
    strategies.tuples(strategies.just("append"), KEYS, VALUES),
    strategies.tuples(strategies.just("add"), KEYS, strategies.integers(-3, 3)),
    strategies.tuples(strategies.just("compare_set"), KEYS, VALUES, VALUES),
    strategies.tuples(strategies.just("delete"), KEYS),
    strategies.tuples(strategies.just("multi_set"), strategies.lists(strategies.tuples(KEYS, VALUES), max_size=3)),
)
READS = strategies.one_of(
    strategies.tuples(strategies.just("check"), KEY_LISTS), strategies.tuples(strategies.just("num_keys"))
)


class Answers(list):
    """What waits were answered, in order."""

    def taker(self, name):
        return lambda status, values: self.append((name, status, list(values)))


def encoded(argument):
    """An argument as the table takes it, which knows bytes only."""
    if isinstance(argument, str):
        return argument.encode()
    return type(argument)(map(encoded, argument)) if isinstance(argument, list | tuple) else argument


def values_of(table):
    answers = Answers()
    for key in "abc":
        table.wait([key.encode()], None, 0.0, answers.taker(key))
    table.expire(0.0)
    return {name: values[0] for name, status, values in answers if status == OK}


def of_torch(store, operation, arguments):
    if operation == "multi_set":
        return store.multi_set([key for key, _ in arguments[0]], [value for _, value in arguments[0]])
    return getattr(store, {"delete": "delete_key"}.get(operation, operation))(*arguments)


def is_number(store, key):
    return not store.check([key]) or re.fullmatch(rb"-?\d+", store.get(key)) is not None


@settings(max_examples=300)
@given(strategies.lists(WRITES | READS, max_size=20))
def test_a_program_of_operations_does_what_it_does_to_the_store_of_torch(program):
    table, store = Table(), HashStore()
    for operation, *arguments in program:
        if operation == "add" and not is_number(store, arguments[0]):  # torch adds to what only begins like one
            with pytest.raises(NotANumberError):
                table.add(*encoded(arguments))
        else:
            assert getattr(table, operation)(*encoded(arguments)) == of_torch(store, operation, arguments)
    assert values_of(table) == {key: store.get(key) for key in "abc" if store.check([key])}


class Model:
    """Waits by their meaning: after each write, all of them look at everything again."""

    def __init__(self):
        self.store = HashStore()
        self.waits = {}
        self.answers = []

    def look(self, now):
        for name, (keys, unless, until) in [*self.waits.items()]:
            if self.store.check(keys):
                self.answer(name, OK, [self.store.get(key) for key in keys])
            elif unless is not None and self.store.check([unless]):
                self.answer(name, GIVEN_UP, [self.store.get(unless)])
            elif until <= now:
                self.answer(name, TIMED_OUT, [])

    def answer(self, name, status, values):
        del self.waits[name]
        self.answers.append((name, status, values))


WAITS = strategies.tuples(
    strategies.just("wait"), KEY_LISTS, KEYS | strategies.none(), strategies.integers(1, 9) | strategies.just(10**6)
)
OTHERS = strategies.tuples(strategies.sampled_from(["cancel", "pass"]), strategies.integers(0, 5))


@settings(max_examples=300)
@given(strategies.lists(WAITS | WAITS | WRITES | OTHERS, max_size=30))
def test_waits_end_with_what_they_wait_for_or_its_opposite_or_their_time(program):
    table, model, answers, waits, now = Table(), Model(), Answers(), {}, 0
    for name, (operation, *arguments) in enumerate(program):
        if operation == "wait":
            keys, unless, limit = arguments
            model.waits[name] = (keys, unless, now + limit)
            waits[name] = table.wait(encoded(keys), encoded(unless), now + limit, answers.taker(name))
        elif operation == "cancel":
            chosen = [one for one in model.waits if one % 6 == arguments[0]]
            for one in chosen:
                del model.waits[one]
                table.cancel(waits[one])
        elif operation == "pass":
            now += arguments[0]
            table.expire(now)
        elif operation == "multi_set":  # the waits look in between
            table.multi_set(encoded(arguments[0]))
            of_torch(model.store, operation, arguments)
        else:
            if operation == "add" and not is_number(model.store, arguments[0]):
                continue
            getattr(table, operation)(*encoded(arguments))
            of_torch(model.store, operation, arguments)
        model.look(now)
        assert sorted(answers) == sorted(model.answers)
        assert table.next_deadline() == min((until for _, _, until in model.waits.values()), default=None)
    for name in model.waits:
        table.cancel(waits[name])
    assert table._waits == {}
    assert table._num_waits == 0


def test_deadlines_of_waits_that_ended_early_do_not_pile_up():
    table = Table()
    for _ in range(10_000):
        table.cancel(table.wait([b"never"], None, 1e9, print))
    assert len(table._deadlines) < 100


@pytest.mark.parametrize("value", [b"", b"-", b"1 ", b"+1", b"1_0", b"9" * 21, b"\xc2\xb2", b"0x1", b"1e3"])
def test_what_is_no_number_is_not_added_to(value):
    table = Table()
    table.set(b"counter", value)
    with pytest.raises(NotANumberError):
        table.add(b"counter", 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_counter_does_not_leave_64_bits(sign):
    table = Table()
    assert table.add(b"counter", sign * MOST_NUMBER) == sign * MOST_NUMBER
    with pytest.raises(NotANumberError):
        table.add(b"counter", sign)


def arrive(table, answers, name, size, until=10.0):
    return table.arrive(b"counter", size, (b"outcome", b"open"), until, answers.taker(name))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_that_arrive_are_let_go_by_the_last(size):
    table, answers = Table(), Answers()
    for name in range(size):
        assert answers == []
        arrive(table, answers, name, size)
    assert sorted(answers) == [(name, OK, [b"open"]) for name in range(size)]


def test_who_gives_up_is_heard_by_all_and_by_those_who_come_later():
    table, answers = Table(), Answers()
    arrive(table, answers, 0, 3)
    table.compare_set(b"outcome", b"", b"rank 2 is late")
    arrive(table, answers, 1, 3)
    arrive(table, answers, 2, 3)
    assert answers == [(name, OK, [b"rank 2 is late"]) for name in range(3)]


def test_a_wait_goes_on_when_a_key_is_gone_before_the_last_comes():
    table, answers = Table(), Answers()
    table.wait([b"a", b"b"], None, 10.0, answers.taker("both"))
    table.set(b"a", b"1")
    table.delete(b"a")
    table.set(b"b", b"2")
    assert answers == []
    table.set(b"a", b"3")
    assert answers == [("both", OK, [b"3", b"2"])]


def will(rank):
    return Will(b"failure", b"news", b"left/%d" % rank, b"%d died" % rank, b"%d is lost" % rank)


@pytest.mark.parametrize("counter", [b"0", b"no number"])
def test_the_first_end_is_told_even_where_nobody_can_count(counter):
    table = Table()
    table.set(b"news", counter)
    for rank in (3, 4):
        table.carry_out(will(rank), is_unreachable=rank == 3)
    assert table.compare_set(b"failure", b"", b"") == b"3 is lost"
    assert table.compare_set(b"news", b"?", b"") == (b"1" if counter == b"0" else counter)


def test_the_end_of_who_has_left_is_not_told():
    table = Table()
    table.set(b"left/3", b"yes")
    table.carry_out(will(3), is_unreachable=False)
    assert table.num_keys() == 1
