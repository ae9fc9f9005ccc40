"""What is pickled by value stays what it was for whoever reads a message or a traceback."""

import inspect
import pickle

from distman._workers.pickling import ModulePickler


def test_functions_keep_their_files_and_lines():
    factor = 3

    def scaled(value):
        return [factor * one for one in (lambda: [value])()]

    copied = pickle.loads(ModulePickler.dumps(scaled))  # noqa: S301 - it was just written
    assert copied is not scaled
    assert copied(2) == [6]
    for mine, theirs in [(scaled.__code__, copied.__code__), (scaled.__code__.co_consts, copied.__code__.co_consts)]:
        inner = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
        for one, other in inner:
            if inspect.iscode(one):
                assert (other.co_filename, other.co_firstlineno) == (__file__, one.co_firstlineno)
