import pytest

from distman._cli.keep.placement import Here, InAllocation, place, read_options

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-6]", "SLURM_NTASKS": "24"}


def in_allocation(*command, spare=2, min_nodes=None, environ=ALLOCATION):
    return place(["srun", *command], environ, spare, min_nodes)


def test_the_first_try_has_the_nodes_that_are_not_spare_and_their_share_of_the_tasks():
    command = in_allocation("python", "train.py", "-n", "3").next_command(set())
    assert command == ["srun", "--nodes=4", "--ntasks=16", "python", "train.py", "-n", "3"]


@pytest.mark.parametrize("words", [["-N4", "-n8"], ["-N", "4", "-n", "8"], ["--nodes=4", "--ntasks", "8"]])
def test_numbers_of_nodes_and_tasks_are_taken_from_srun(words):
    placement = in_allocation("-l", *words, "--mem", "4G", "python", "train.py")
    placement.next_command(set())
    command = placement.next_command({"n2"})
    options = ["--nodes=4", "--ntasks=8", "--exclude=n2", "--overlap"]
    assert command == ["srun", *options, "-l", "--mem", "4G", "python", "train.py"]


@pytest.mark.parametrize(
    ("options", "numbers", "left"),
    [
        ("-l", (None, None), "-l"),
        ("-u -K --exclusive --overlap", (None, None), "-u -K --exclusive --overlap"),
        ("-luN 4 -vn8", (4, 8), "-lu -v"),
        ("-K1 -I60 -N4", (4, None), "-K1 -I60"),
        ("--nodes 4 --label --ntasks=8 --pty", (4, 8), "--label --pty"),
        ("-J -n --job-name -N", (None, None), "-J -n --job-name -N"),
        ("--mem 4G -c 2 -tra", (None, None), "--mem 4G -c 2 -tra"),
        ("--of-a-plugin=7 -N 4", (4, None), "--of-a-plugin=7"),
        ("--of-a-plugin -N 4", (4, None), "--of-a-plugin"),
        ("-n8 --of-a-plugin --", (None, 8), "--of-a-plugin --"),
        ("--", (None, None), "--"),
    ],
)
@pytest.mark.parametrize(
    "program", ["python -u train.py -n 64", "./train.sh -N 128 -w 0.01 --exclude=x", "env -x a", ""]
)
def test_options_of_the_program_are_not_those_of_srun(options, numbers, left, program):
    found = read_options([*options.split(), *program.split()])
    assert found == (*numbers, [*left.split(), *program.split()])


@pytest.mark.parametrize(("option", "remedy"), [("--of-a-plugin", "--of-a-plugin=python"), ("-P", "-Ppython")])
def test_what_may_be_a_value_or_the_program_is_not_guessed(option, remedy):
    with pytest.raises(ValueError, match=f"^{option} must be an option of srun .* Write {remedy}, or -- before"):
        read_options(["-l", option, "python", "-n", "64"])


def test_without_a_number_of_tasks_srun_decides():
    environ = {name: value for name, value in ALLOCATION.items() if name != "SLURM_NTASKS"}
    placement = in_allocation("python", environ=environ)
    assert placement.next_command(set()) == ["srun", "--nodes=4", "python"]


def test_there_are_never_fewer_nodes_unless_that_was_allowed():
    bad = {"n1", "n2", "n3"}
    assert in_allocation("python").lacks_hosts(bad - {"n3"}) is None
    assert in_allocation("python").lacks_hosts(bad) == "3 of 6 nodes are left, and the job needs 4"
    fewer = in_allocation("-N4", "-n8", "python", min_nodes=3)
    assert fewer.lacks_hosts(bad) is None
    assert fewer.next_command(bad)[1:3] == ["--nodes=3", "--ntasks=6"]


def test_more_nodes_than_the_allocation_has_are_refused():
    with pytest.raises(ValueError, match="6 nodes are too few for 5 and 2 spare ones"):
        in_allocation("-N5", "python")


@pytest.mark.parametrize("option", ["-w", "--nodelist=n1", "-x", "--exclude=n1", "-lxn1"])
def test_a_command_that_chooses_hosts_itself_is_refused(option):
    with pytest.raises(ValueError, match="chooses hosts, as `distman keep` does"):
        read_options([option, "n1", "python"])


def test_a_number_of_nodes_must_be_one():
    with pytest.raises(ValueError, match="--nodes must be a number, got '2-4'"):
        read_options(["--nodes=2-4", "python"])


def test_other_commands_start_as_they_are():
    placement = place(["torchrun", "train.py"], ALLOCATION, 0, None)
    assert isinstance(placement, Here)
    assert placement.next_command({"n1"}) == ["torchrun", "train.py"]
    assert isinstance(place(["/usr/bin/srun", "python"], ALLOCATION, 0, None), InAllocation)


def test_spare_nodes_need_an_allocation():
    with pytest.raises(ValueError, match="--spare and --min-nodes need `srun` in an allocation"):
        place(["srun", "python"], {}, 1, None)
