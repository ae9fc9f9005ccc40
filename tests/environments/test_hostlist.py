"""Slurm's compressed texts, against a table of spellings and against Slurm itself."""

import os
import random
import shutil
import subprocess

import pytest
from hypothesis import given, settings, strategies as st

from distman.environments._hostlist import MAX_ENTRIES, first_host, parse_hostlist, parse_tasks_per_node
from distman.errors import LaunchEnvironmentError

NUM_LISTS = 3000
QUICK = 2000  # milliseconds, for a million hosts on a busy machine

SPELLINGS = [
    ("n5", "n5"),
    ("n1,n2", "n1 n2"),
    ("n1 n2\tn3\nn4", "n1 n2 n3 n4"),
    (" ,n1,,n2, ", "n1 n2"),
    ("n[1-3,7],m3", "n1 n2 n3 n7 m3"),
    ("linux[1,2]", "linux1 linux2"),
    ("node[001-003,010]", "node001 node002 node003 node010"),
    ("a,b[001,003],c", "a b001 b003 c"),
    ("x[08-11]", "x08 x09 x10 x11"),
    ("x[8-011]", "x8 x9 x10 x11"),
    ("x[099-101]", "x099 x100 x101"),
    ("rack1-n[09-11]", "rack1-n09 rack1-n10 rack1-n11"),
    ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
    ("rack[1-2]n[1-4]", "rack1n1 rack1n2 rack1n3 rack1n4 rack2n1 rack2n2 rack2n3 rack2n4"),
    ("n[1-2]x[1-2]y[1-2]", "n1x1y1 n1x1y2 n2x1y1 n2x1y2 n1x2y1 n1x2y2 n2x2y1 n2x2y2"),
    ("[1-2]", "1 2"),
    ("gpu-[3].example.org", "gpu-3.example.org"),
    ("n[1-2]-ib", "n1-ib n2-ib"),
    ("tux[0-1],gpu[03-04,07].cluster", "tux0 tux1 gpu03.cluster gpu04.cluster gpu07.cluster"),
    ("n3,n1,n3", "n3 n1 n3"),
    ("n[3,1,3]", "n3 n1 n3"),
]

NO_HOST_LISTS = ["", " , ", "n[", "n]", "n[]", "n[1-3", "n[1,]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n[-1]", "n[[1]]"]
NO_HOST_LISTS += ["n(1)", "n[1-70000]", "n[1-1000000000000]", "n[1-9999999999999999999]", "n[\u0661-\u0663]"]

TASKS = [("1", [1]), ("4,2,1", [4, 2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("2,1(x2)", [2, 1, 1]), ("2(x1)", [2])]

NO_TASKS = ["", ",", "2(x3", "2(3)", "2x3", "2(x)", "(x2)", "-1", "a", "2,,1", "1(x1048577)", "\u0662"]


@pytest.mark.parametrize(("text", "hosts"), SPELLINGS)
def test_a_host_list_names_its_hosts_in_order(text, hosts):
    assert parse_hostlist(text) == hosts.split()


def test_the_first_host_is_the_first_of_the_list():
    assert first_host("node[08-10],gpu5") == "node08"


@pytest.mark.parametrize("text", NO_HOST_LISTS)
def test_what_is_no_host_list_is_shown_with_a_remedy(text):
    with pytest.raises(LaunchEnvironmentError) as caught:
        parse_hostlist(text)
    shown = repr(text) if len(text) <= 80 else repr(text[:77] + "...")
    assert f"got {shown}: " in str(caught.value)
    assert str(caught.value).endswith("Correct or unset the variable.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n[3-1]", "'3-1' is not a number, nor a range of at most 65,536 numbers"),
        ("n[1,x]", "'x' is not a number, nor a range of at most 65,536 numbers"),
        ("n[1-70000]", "'1-70000' is not a number, nor a range of at most 65,536 numbers"),
        ("a[1-2000]b[1-2000]", "it has more than 1,048,576 entries"),
        (",", "it names no host, or has a bracket too many"),
        ("n1,n]", "it names no host, or has a bracket too many"),
    ],
)
def test_the_message_says_what_is_wrong_with_the_list(text, reason):
    with pytest.raises(LaunchEnvironmentError) as caught:
        parse_hostlist(text)
    assert reason in str(caught.value)


def test_a_range_may_have_as_many_numbers_as_slurm_allows():
    assert len(parse_hostlist("n[1-65536]")) == 65_536
    with pytest.raises(LaunchEnvironmentError, match="'0-65536' is not a number, nor a range of at most 65,536"):
        parse_hostlist("n[0-65536]")


@pytest.mark.parametrize(("text", "tasks"), TASKS)
def test_tasks_per_node_are_one_number_for_each_node(text, tasks):
    assert parse_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", NO_TASKS)
def test_what_is_no_tasks_per_node_is_shown_with_a_remedy(text):
    with pytest.raises(LaunchEnvironmentError) as caught:
        parse_tasks_per_node(text)
    assert f"got {text!r}" in str(caught.value)
    assert str(caught.value).endswith("Correct or unset the variable.")


@settings(deadline=QUICK)
@given(
    st.one_of(st.text(), st.text("n0129[](),-x \n"), st.from_regex(r"(n\[\d{1,9}-\d{1,9}\],?){1,3}", fullmatch=True))
)
def test_any_text_gives_hosts_or_an_error(text):
    hosts = result_or_error(parse_hostlist, text)
    assert hosts is None or 0 < len(hosts) <= MAX_ENTRIES


@settings(deadline=QUICK)
@given(st.one_of(st.text(), st.text("0129(),x "), st.from_regex(r"(\d{1,9}\(x\d{1,9}\),?){1,3}", fullmatch=True)))
def test_any_text_gives_tasks_or_an_error(text):
    tasks = result_or_error(parse_tasks_per_node, text)
    assert tasks is None or len(tasks) <= MAX_ENTRIES


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_tasks_are_repeated_as_often_as_slurm_says(runs):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    assert parse_tasks_per_node(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


def test_random_lists_are_read_as_scontrol_reads_them(scontrol):
    random_source = random.Random(20)  # noqa: S311 - no secret
    lists = [random_list(random_source) for _ in range(NUM_LISTS)]
    assert [parse_hostlist(text) for text in lists] == scontrol(lists)


def result_or_error(function, text):
    """Return what the function returns, or None where it raises the one error it may raise."""
    try:
        return function(text)
    except LaunchEnvironmentError:
        return None


@pytest.fixture
def scontrol(tmp_path):
    """A function that asks one ``scontrol`` process for the hosts of many lists."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("scontrol is not installed")
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=none\nSlurmctldHost=localhost\n", encoding="utf-8")
    # It echoes each command, and would wrap a long one.
    environ = {"PATH": os.defpath, "SLURM_CONF": str(configuration), "TERM": "dumb", "COLUMNS": "10000"}

    def hosts_of(lists):
        commands = "".join(f"show hostnames {text}\n" for text in lists)
        run = subprocess.run([program], input=commands, env=environ, capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stderr) == (0, "")
        _, *answers = run.stdout.removesuffix("scontrol: \n").split("scontrol: show hostnames ")
        echoes, hosts = zip(*((answer.splitlines()[0], answer.splitlines()[1:]) for answer in answers), strict=True)
        assert list(echoes) == lists
        return list(hosts)

    return hosts_of


def random_list(random_source):
    return ",".join(random_name(random_source) for _ in range(random_source.choice([1, 1, 2, 3, 4])))


def random_name(random_source):
    """A name with up to three brackets; Slurm 22.05 wants nothing after the last one."""
    brackets = ["[" + random_ranges(random_source) + "]" for _ in range(random_source.choice([0, 1, 1, 2, 2, 3]))]
    texts = ["", *(random_text(random_source) for _ in brackets[1:])]
    name = random_source.choice("abn") + random_text(random_source)
    return name + "".join(text + bracket for text, bracket in zip(texts, brackets, strict=False))


def random_text(random_source):
    return "".join(random_source.choices("abn019-._", k=random_source.randrange(4)))


def random_ranges(random_source):
    return ",".join(random_range(random_source) for _ in range(random_source.choice([1, 1, 2, 3])))


def random_range(random_source):
    """One number or a short range, padded with zeros or not, on either side."""
    digits = random_source.choice([1, 1, 2, 3, 5])
    low = str(random_source.randrange(10**digits)).zfill(random_source.randrange(digits + 2))
    high = str(int(low) + random_source.randrange(4)).zfill(random_source.choice([1, len(low)]))
    return low if random_source.random() < 0.4 else f"{low}-{high}"
