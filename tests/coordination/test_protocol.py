"""The control protocol has one home: no key of the store is spelt out elsewhere, none stands for two things."""

import ast
import functools
import inspect
import itertools
from pathlib import Path

import pytest

import distman
from distman._coordination import protocol

PACKAGE = Path(distman.__file__).parent
OWNERS = ("store", "client", "table")
METHODS = {
    **dict.fromkeys(("set", "get", "add", "append", "compare_set", "delete", "delete_key"), ((0, "key"),)),
    **dict.fromkeys(("check", "delete_keys", "has_come", "multi_get", "multi_set"), ((0, "keys"),)),
    "wait": ((0, "keys"), (2, "unless")),
    "arrive": ((0, "counter"), (2, "outcome")),
    "register_will": ((0, "key"), (1, "counter"), (2, "unless")),
}
"""Methods of stores, and what they are made of: where the arguments stand that are keys, and how they are called."""
TAKE_KEYS = {
    "PrefixStore": (0, "prefix"),
    "store.part": (0, "name"),
    "KeySequence": (1, "name"),
    "AbortableStore": (1, "failure_key"),
    "claim": (1, "key"),
    "count": (1, "key"),
    "decode_at_once": (1, "key"),
    "is_first": (1, "key"),
    "ExclusiveSection": (1, "key"),
    "wait_for_all": (1, "key"),
    "consensus.agree": (0, "key"),
    "consensus.compare": (0, "key"),
    "consensus.require_success": (0, "key"),
}
"""What hands a key on to a store: where its argument stands, and how it is called."""


def name_of(node):
    """The last name of an expression: of a call's function, or of what a method belongs to."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keys_in(call, take_keys):
    """The arguments of a call that are keys of a store."""
    name, owner = name_of(call.func), name_of(getattr(call.func, "value", None))
    if name in METHODS and owner.endswith(OWNERS):
        places = METHODS[name]
    else:
        places = tuple(place for one in (f"{owner}.{name}", name) if (place := take_keys.get(one)))
    found = [argument.value for argument in call.keywords if argument.arg in dict(places).values()]
    found += [argument for position, _ in places for argument in call.args[position : position + 1]]
    return [key.elts[0] if name == "arrive" and isinstance(key, ast.Tuple) else key for key in found]  # with its value


def parts(node):
    """An expression and what it is made of, without what the protocol makes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and name_of(node.func.value) == "protocol":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from parts(child)


@functools.cache
def nodes(tree, kind=ast.AST):
    """What a tree has of a kind; it is asked again and again."""
    return [*ast.walk(tree)] if kind is ast.AST else [node for node in nodes(tree) if isinstance(node, kind)]


def functions(tree):
    return nodes(tree, ast.FunctionDef)


def with_helpers(tree):
    """What takes keys, and the functions of this module whose arguments reach it."""
    found, known = dict(TAKE_KEYS), 0
    while known != len(found):
        known = len(found)
        for function in functions(tree):
            names = [argument.arg for argument in function.args.args if argument.arg != "self"]
            for call in nodes(function, ast.Call):
                used = {part.id for key in keys_in(call, found) for part in parts(key) if isinstance(part, ast.Name)}
                for name in used.intersection(names) if function.name not in METHODS else ():
                    found.setdefault(function.name, (names.index(name), name))
    return found


def assignments(nodes):
    """What each name may stand for."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "iter", None) or getattr(node, "value", None)
        for part in (part for target in targets if target and value for part in ast.walk(target)):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id, value


def literals(node, values, seen=frozenset()):
    """The strings that an expression is made of, through the names in it."""
    for part in parts(node):
        if isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes)):
            yield ast.unparse(part)
        elif isinstance(part, ast.Name) and part.id not in seen:
            for name, value in values:
                if name == part.id:
                    yield from literals(value, values, seen | {part.id})


def spelt_out(tree):
    """The keys that a module spells out, with the lines."""
    take_keys, found = with_helpers(tree), set()
    constants = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    for function in functions(tree):
        keys = [(call, key) for call in nodes(function, ast.Call) for key in keys_in(call, take_keys)]
        values = [*assignments(constants), *assignments(nodes(function))] if keys else []
        found |= {f"line {call.lineno}: {text}" for call, key in keys for text in literals(key, values)}
    return sorted(found)


@functools.cache
def package():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}


def test_no_key_is_spelt_out_outside_the_protocol():
    found = {name: spelt_out(tree) for name, tree in package().items() if name != "_coordination/protocol.py"}
    assert {name: keys for name, keys in found.items() if keys} == {}


@pytest.mark.parametrize(
    "source",
    [
        "store.set('planted', 'yes')",
        "self._store.add(f'planted/{rank}', 1)",
        "store_group.job_store.check([f'planted/{rank}'])",
        "store.delete_key('planted/' + str(rank))",
        "store.append('planted', '1,')",
        "store.multi_set(['planted'], ['yes'])",
        "store.has_come(['planted'], 1.0)",
        "store.arrive('planted', 2, (protocol.outcome(key), 'open'), 1.0)",
        "store.arrive(protocol.passages(key), 2, ('planted', 'open'), 1.0)",
        "store.wait([protocol.VERDICT], unless=b'planted')",
        "store.register_will(protocol.FAILURE, protocol.NEWS, unless=f'planted/{rank}', if_closed='died')",
        "store.register_will(protocol.FAILURE, 'planted', unless=protocol.left(rank), if_closed='died')",
        "self.client.compare_set(b'planted', b'', failure)",
        "client.add(f'planted/{rank}'.encode(), 1)",
        "self._table.add(b'planted', 1)",
        "job_store.store.part('planted')",
        "self.store.part('planted')",
        "key = f'planted {rank}'; store.get(key)",
        "keys = [f'planted {n}' for n in range(3)]; store.multi_get(keys)",
        "[store.get(key) for key in ['planted']]",
        "dist.PrefixStore(f'planted {rank}', store)",
        "KeySequence(store, 'planted', 3)",
        "AbortableStore(plain, f'{operation}/planted', 1.0)",
        "group.consensus.compare('planted', call, place='')",
        "helper(store, 'planted')",
        "helper(store, counter='planted')",
        "consensus.require_success('planted', None)",
        "wait_for_all(store_group, 'planted', timeout=1)",
        "count(store, 'planted')",
        "claim(store, f'planted/{rank}', mine, decode)",
    ],
)
def test_a_planted_key_is_found(source):
    helper = "def helper(store, counter):\n    def wait():\n        store.add(counter, 0)\n"
    tree = ast.parse(f"{helper}\ndef planted(self, store):\n    {source}\n")
    assert [text for text in spelt_out(tree) if "planted" in text] != []


@pytest.mark.parametrize(
    "source",
    [
        "store.set(protocol.left(3), 'yes')",
        "environ.get('HOME')",
        "store.check([protocol.report(1, 'links', 2)])",
        "store.arrive(protocol.passages('x'), 2, (protocol.outcome('x'), 'open'), 1.0)",
        "client.compare_set(protocol.FAILURE.encode(), b'', b'it failed')",
    ],
)
def test_keys_of_the_protocol_and_other_strings_are_left_alone(source):
    assert spelt_out(ast.parse(f"def here(store, environ):\n    {source}\n")) == []


def entries():
    """Every entry of the protocol, with a key that it stands for."""
    found = {name: value for name, value in vars(protocol).items() if name.isupper()}
    templates = {name: value.__self__ for name, value in vars(protocol).items() if inspect.isbuiltin(value)}
    found |= {name: template.format(*range(template.count("{}"))) for name, template in templates.items()}
    return found | {"job": protocol.job(5), "barrier": protocol.barrier(1, "x")}


def test_no_two_entries_are_one_key():
    keys = entries()
    assert [pair for pair in itertools.combinations(keys, 2) if keys[pair[0]] == keys[pair[1]]] == []


def test_each_entry_is_used():
    used = {node.attr for tree in package().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    inside = {node.id for node in ast.walk(package()["_coordination/protocol.py"]) if isinstance(node, ast.Name)}
    assert set(entries()) - used - inside == set()
