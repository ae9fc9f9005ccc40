"""Trees and meshes written in one line."""

import pytest
from hypothesis import given, strategies as st

from distman.topology import NotationError, ProcessGroupConfig, ProcessGroupNode, parse_mesh, parse_tree

NAMES = st.text("abcz_-*.µ0123", min_size=1, max_size=4)


@st.composite
def trees(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    config = ProcessGroupConfig(ProcessGroupNode(names[0]))
    for index, name in enumerate(names[1:], start=1):
        config.add_node(ProcessGroupNode(name), names[draw(st.integers(0, index - 1))])
    for leaf in config.leaf_groups():
        config.get_node(leaf).size = draw(st.one_of(st.none(), st.integers(1, 10**9)))
    return config


def described(config, name=None):
    """Everything that a tree says, as nested tuples."""
    node = config.get_node(name or config.root.name)
    return node.name, node.size, tuple(described(config, child.name) for child in config.children(node.name))


@given(trees())
def test_the_text_of_a_tree_is_read_as_that_tree(config):
    assert described(parse_tree(str(config))) == described(config)


def test_white_space_does_not_matter_and_nodes_may_have_sizes():
    config = parse_tree("  world = 8( data =2,\n model=4(x=2 ,y=2))  ")
    assert str(config) == "world(data=2, model(x=2, y=2))"
    assert (config.root.size, config.get_node("model").size) == (8, 4)


@pytest.mark.parametrize(
    ("text", "position", "sentence"),
    [
        ("", 0, "the tree must have a name here, got the end. Write one:"),
        ("(a=2)", 0, "the tree must have a name here, got '('. Write one:"),
        ("world(a=2", 9, "the tree must have ',' or ')' here, got the end. Add it, or correct what stands here:"),
        ("world(a=2 b=4)", 10, "the tree must have ',' or ')' here, got 'b'. Add it, or correct what stands here:"),
        ("world(a=2))", 10, "the tree must end here, got ')'. Remove what follows, or open its bracket:"),
        ("world(a=2,)", 10, "the tree must have a name here, got ')'. Write one:"),
        ("world(a=2, a=4)", 11, "the tree must name each group once, got 'a'. Choose another name:"),
        ("world(a=x)", 8, "the tree must have a positive number of ranks here, got 'x'. Correct the size:"),
        ("world(a=)", 8, "the tree must have a positive number of ranks here, got ')'. Correct the size:"),
        ("world(a=-1)", 8, "the tree must have a positive number of ranks here, got '-1'. Correct the size:"),
        ("world(a=0)", 8, "the tree must have a positive number of ranks here, got '0'. Correct the size:"),
        ("world(a=\u0662)", 8, "the tree must have a positive number of ranks here, got '\u0662'. Correct the size:"),
    ],
)
def test_an_error_shows_the_place_in_a_tree(text, position, sentence):
    with pytest.raises(NotationError) as caught:
        parse_tree(text)
    assert (caught.value.text, caught.value.position) == (text, position)
    assert str(caught.value) == f"{sentence}\n  {text}\n  {' ' * position}^"


def test_a_mesh_is_axes_in_order():
    assert list(parse_mesh("data=-1, model=4").items()) == [("data", -1), ("model", 4)]


@pytest.mark.parametrize(
    ("text", "position"), [("", 0), ("data", 4), ("data=", 5), ("data=0", 5), ("a=2,", 4), ("a=2,a=2", 4), ("a=2)", 3)]
)
def test_an_error_shows_the_place_in_a_mesh(text, position):
    with pytest.raises(NotationError, match="the mesh must") as caught:
        parse_mesh(text)
    assert caught.value.position == position
