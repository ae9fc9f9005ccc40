"""The children of a process."""

import os
import subprocess
import sys

from distman._base.process_tree import _children, children_by_parent


def test_children_are_found_where_the_kernel_does_not_list_them():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_by_parent()
        assert set(children_by_parent()) == set(_children())
        assert os.getpid() not in children_by_parent()
